"""Makes packed (THD) micro-batches of equal work for Megatron-Core from its .bin and .idx files.

`python -m experiments.examples.megatron STORE` prints the first steps of two data-parallel ranks.
In a training loop, `PackedSteps.next` replaces `wrap_data_iterator`, and the forward step passes
the result of `packed_seq_params` to the model.

Micro-batches have different numbers of tokens. So set `calculate_per_token_loss`, and let
`loss_func` return (sum of losses, tokens, report).
"""

import argparse

from megatron.core.transformer import TransformerConfig

from wlb import Planner, TokenStore
from wlb.adapters.megatron import PackedSteps, packed_seq_params
from wlb.data.reader import StoreReader

RANKS, MICRO_BATCHES, WINDOW = 2, 4, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", help="prefix of the .bin and .idx")
    parser.add_argument("--vocabulary", type=int, default=1 << 17)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    store = TokenStore(options.store)
    print(f"{options.store}: {store.summary}")
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, calculate_per_token_loss=True
    )
    for rank in range(RANKS):
        planner = Planner.for_lengths(
            store,
            context_window=WINDOW,
            num_micro_batches=RANKS * MICRO_BATCHES,
            dp=RANKS,
            epochs=0,  # repeats the data without end
            shuffle=True,
        )
        reader = StoreReader(options.store, store.vocab_size or options.vocabulary)
        steps = PackedSteps(planner, reader, dp_rank=rank, config=config)
        for step in range(options.steps):
            batches, _, tokens, _ = steps.next()
            for micro_batch, batch in enumerate(batches):
                starts = packed_seq_params(batch).cu_seqlens_q
                assert starts is not None
                print(
                    f"step {step} of {tokens:,.0f} tokens, rank {rank} micro-batch {micro_batch}: "
                    f"{batch['tokens'].shape[1]} tokens of {len(starts) - 1} documents"
                )


if __name__ == "__main__":
    main()
