"""What is written into the paged caches, by Triton kernels that any GPU from SM80 on runs: the
window's and the compressed records, the indexer's keys. Byte for byte the references' work."""
