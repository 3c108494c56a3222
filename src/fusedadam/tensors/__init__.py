"""What a tensor is to a kernel: its layout, how it reaches a device, which shard is here.

Every other room deals in tensors, so this one imports none of them.

layout.py           which strides kernels can walk, and copies for the others; which tensors share memory
transfer.py         from the host to a device, without waiting
cuda_driver.py      launches and small copies, straight through CUDA's driver
shards.py           the local shard of a DTensor
host_memory.py      states in page-locked host memory, which a device's kernels use in place
side_stream.py      steps beside the model, on a stream of their own
matrices.py          tensors as matrices, and matrices in float16, whose range is small
factored.py         states that leave out dimensions of their parameter: their shapes and shards
complex_numbers.py  complex tensors as real ones, with real and imaginary parts side by side
"""
