"""vLLM's small kernels around the model that a CPU takes in torch: their part of the hooks."""

from __future__ import annotations

from spark_overlay.hook import Hook

_BATCH, _BUFFERS = "vllm.v1.worker.gpu.input_batch", "vllm.v1.worker.gpu.buffer_utils"
_TABLES = "vllm.v1.worker.gpu.block_table:BlockTables"


def slow(target: str, parameters: str, replacement: str) -> Hook:
    return Hook(
        target,
        tuple(parameters.split()),
        replacement,
        "Triton's interpreter takes seconds for this kernel; the torch reference is exact",
        "cpu",
    )


def _program_a_row(target: str, replacement: str) -> Hook:
    return Hook(
        target,
        None,
        replacement,
        "a program a row under Triton's interpreter; torch takes all rows at once, and exactly",
        "cpu",
    )


SMALL: tuple[Hook, ...] = (
    slow(
        "vllm.v1.attention.backends.mla.sparse_swa:ComputeSWAIndicesAndLensKernel.__call__",
        "self swa_indices swa_lens window_size index_width left_visible right_visible "
        "query_start_loc seq_lens token_to_req_indices is_valid_token block_table block_size "
        "replay_start num_tokens token_offset has_image",
        "spark_overlay.cpu.launches:compute_swa_indices_and_lens",
    ),
    Hook(
        "vllm.models.deepseek_v41.common.engram:_hash_ids_kernel",
        None,
        "spark_overlay.cpu.launches:hash_ids",
        "a launch a layer under the interpreter; torch computes all layers at once, and exactly",
        "cpu",
    ),
    slow(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator:prepare_dflash_inputs",
        "input_buffers query_slot_mapping context_positions context_slot_mapping sample_indices "
        "sample_pos sample_idx_mapping temperature seeds input_batch num_sampled num_rejected "
        "last_sampled next_prefill_tokens input_temperature input_seeds block_table block_size "
        "cp_rank cp_size cp_interleave parallel_drafting_token_id num_query_per_req "
        "num_speculative_steps max_num_reqs max_num_tokens max_model_len sample_from_anchor",
        "spark_overlay.cpu.launches:prepare_dflash_inputs",
    ),
    slow(
        "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
        "logits token_ids",
        "spark_overlay.cpu.launches:compute_token_logprobs",
    ),
    _program_a_row(
        "vllm.v1.worker.gpu.sample.logprob:_ranks_kernel",
        "spark_overlay.cpu.launches:token_ranks",
    ),
    slow(
        f"{_TABLES}.gather_block_tables",
        "self idx_mapping num_reqs_padded out out_ptrs",
        "spark_overlay.cpu.batches:gather_block_tables",
    ),
    slow(
        f"{_TABLES}.compute_slot_mappings",
        "self idx_mapping query_start_loc positions num_tokens_padded out",
        "spark_overlay.cpu.batches:compute_slot_mappings",
    ),
    slow(
        f"{_BUFFERS}:StagedWriteTensor.apply_write",
        "self",
        "spark_overlay.cpu.batches:apply_write",
    ),
    slow(
        f"{_BUFFERS}:FusedStagedWriter.apply",
        "self tensors output_ptrs output_strides",
        "spark_overlay.cpu.batches:apply_writes",
    ),
    slow(
        "vllm.v1.attention.backends.mla.compressor_utils:CompressedSlotMappingKernel.__call__",
        "self compressed_slot_mapping slot_mapping query_start_loc seq_lens block_table block_size "
        "compress_ratio dcp_world_size cp_interleave",
        "spark_overlay.cpu.batches:compressed_slot_mapping",
    ),
    _program_a_row(
        f"{_BATCH}:_prepare_pos_seq_lens_kernel",
        "spark_overlay.cpu.batches:prepare_pos_seq_lens",
    ),
    _program_a_row(
        f"{_BATCH}:_combine_sampled_and_draft_tokens_kernel",
        "spark_overlay.cpu.batches:combine_sampled_and_draft_tokens",
    ),
    _program_a_row(
        f"{_BATCH}:_prepare_prefill_inputs_kernel",
        "spark_overlay.cpu.batches:prepare_prefill_inputs",
    ),
    _program_a_row(
        f"{_BATCH}:_post_update_kernel",
        "spark_overlay.cpu.batches:post_update",
    ),
    _program_a_row(
        "vllm.v1.attention.ops.metadata:_token_request_mapping_kernel",
        "spark_overlay.cpu.batches:token_request_mapping",
    ),
    _program_a_row(
        "vllm.models.deepseek_v41.nvidia.model_state:_gather_lookback_kernel",
        "spark_overlay.cpu.batches:gather_lookback",
    ),
    _program_a_row(
        "vllm.v1.worker.gpu.structured_outputs:_apply_grammar_bitmask_kernel",
        "spark_overlay.cpu.draws:apply_grammar_bitmask",
    ),
    _program_a_row(
        "vllm.v1.worker.gpu.sample.gumbel:_gumbel_sample_kernel",
        "spark_overlay.cpu.draws:gumbel_sample",
    ),
)
