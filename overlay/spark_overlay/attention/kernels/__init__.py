"""Kernels of sparse attention over paged KV records, for every GPU that has mma.sync (SM80 on).

    sparse_mla    attention of each token over its own records: window and choice in one softmax
    chosen_slots  the indexer's positions -> slots of the paged cache
    combine       choice and window -> one row of workspace indices a token
    gather        records of whole requests -> bf16 rows

Each has its plain torch counterpart in ``kernels.reference``. Nothing is tuned while serving, no
call waits for the GPU, and all may be captured in CUDA graphs.
"""

from spark_overlay.attention.kernels.indices import chosen_slots, combine
from spark_overlay.attention.kernels.records import gather
from spark_overlay.attention.kernels.sparse import Source, sparse_mla

__all__ = ["Source", "chosen_slots", "combine", "gather", "sparse_mla"]
