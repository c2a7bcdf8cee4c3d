"""Replaces transformers' Trainer and TRL's SFTTrainer in tests that simulate many processes."""

from types import SimpleNamespace
from typing import Any

from accelerate.data_loader import prepare_data_loader
from datasets import Dataset

ROWS = Dataset.from_dict({"input_ids": [[1] * 5] * 100})


class StandIn:
    """A trainer as it is after its arguments were read.

    Its accelerator divides batches as accelerate does; this process is the first. Of `world_size`
    processes, tp x cp x sp share the same batches.
    """

    model_accepts_loss_kwargs = True
    compute_loss_func: Any = None
    loss_is_scaled_for_ga: bool | None = None

    def __init__(
        self,
        data_collator: Any = None,
        *,
        world_size: int = 1,
        tp: int = 1,
        cp: int = 1,
        sp: int = 1,
        **options: Any,
    ) -> None:
        self.data_collator = data_collator or (lambda rows: {"padded": rows})
        self.model, self.train_dataset = SimpleNamespace(), ROWS
        self.sizes, ranks = {"tp": tp, "cp": cp, "sp": sp}, world_size // (tp * cp * sp)
        given: dict[str, Any] = {
            "world_size": world_size,
            "average_tokens_across_devices": True,
            "remove_unused_columns": False,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 1,
            "max_steps": -1,
            "auto_find_batch_size": False,
            "seed": 0,
            "dataloader_num_workers": 0,
            "dataloader_pin_memory": False,
            "dataloader_persistent_workers": False,
            "dataloader_prefetch_factor": None,
            "dataloader_multiprocessing_context": None,
            "dataloader_in_order": True,
        }
        self.args = SimpleNamespace(**(given | options))
        self.accelerator = SimpleNamespace(
            dataloader_config=SimpleNamespace(dispatch_batches=None, split_batches=False),
            prepare=lambda loader: prepare_data_loader(
                loader, num_processes=ranks, process_index=0, put_on_device=False
            ),
        )

    def get_tp_size(self) -> int:
        return self.sizes["tp"]

    def get_cp_size(self) -> int:
        return self.sizes["cp"]

    def get_sp_size(self) -> int:
        return self.sizes["sp"]

    def _remove_unused_columns(self, dataset: Any, description: str) -> Any:
        return dataset
