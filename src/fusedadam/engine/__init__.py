"""One step over all parameters: what moved, which kernels run, with which scalars, in which order.

Everything that can be precomputed is, in a plan that is kept from step to step. Optimizers, operators and clipping all
come through here; backends implement backend.py.

changes/                        have tensors moved since the last step?
participant.py                  a parameter that takes part in a step, and the states that it needs
plan.py                         what stays the same from step to step
step_counts.py                  how often each parameter was updated, on the host or on the device
host_scalars.py                 the scalars of a step, computed on the host
device_scalars.py               the scalars of a step that only the device knows
scalar_kernel.py                computes them there, by a kernel of the backend
scalar_operations.py            computes them there, by torch operations
member.py                       a parameter that takes part in a launch, and the tensors of its roles
unscaling.py                    gradients under a GradScaler, which a step leaves unscaled
launch.py                       stages in order, over all members: measure, decide, apply
launch_table.py                 members as addresses, sizes and scalars, in one table
geometry.py                     members as rows, segments and chunks
kept_launches.py                launches of operators and of clipping, kept from call to call
reduction.py                    sums over shards: one all-reduce a round
backend.py                      the protocol that backends implement
"""
