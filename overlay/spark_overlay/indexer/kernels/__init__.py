"""The lightning indexer in Triton: scores over paged e4m3 keys, candidate blocks, top-k.

The torch references are in ``spark_overlay.indexer.reference``; they serve on a CPU and are the
oracle of the tests. Nothing here asks the device anything, so a CUDA graph may hold all of it.
"""
