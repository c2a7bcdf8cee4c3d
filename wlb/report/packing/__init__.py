"""Tables, figures and the page of a comparison of packing policies."""
