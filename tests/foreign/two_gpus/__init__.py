"""A box of two GPUs of 24 GiB, as its driver and its programs tell of it.

``pynvml`` stands in for NVIDIA's library, ``bin/docker`` for docker, ``bin/llama-server`` and
``bin/gpu-server`` for programs that take memory of the GPUs that they see. What is in use is in a directory,
``TWO_GPUS``: a file for each GPU and process, ``INDEX.PID``, with the bytes.
"""
