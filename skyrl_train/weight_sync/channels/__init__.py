"""Weight transports: shared memory, CUDA IPC and NCCL or gloo broadcast. Read `channel` (the protocol), then
`table`.
"""
