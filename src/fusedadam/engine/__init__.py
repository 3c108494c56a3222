"""One step over all parameters: what moved, which kernels run, with which scalars, in which order.

Everything that can be precomputed is, in a plan that is kept from step to step. Optimizers, operators and clipping all
come through here; backends implement backend.py.

changes/                        have tensors moved since the last step?
participant.py                  a parameter that takes part in a step, and the states that it needs
plan.py                         what stays the same from step to step: prepared, committed, run
scalars.py                      who computes the scalars of which members, and who counts their steps
step_counts.py                  how often each parameter was updated, on the host or on the device
device_scalars.py               scalars that the device computes, by a kernel of the backend
member.py                       a parameter that takes part in a launch, and the tensors of its roles
unscaling.py                    gradients under a GradScaler, which a step leaves unscaled
launch.py                       stages in order, over all members: measure, decide, apply
launch_table.py                 members as addresses, sizes and scalars, in one table
products.py                     products of matrices: which members share a launch or a batch, and memory
exchange.py                     whole matrices from shards: an all-to-all to their owners, and one back
geometry.py                     members as rows, segments and chunks
kept_launches.py                launches of operators and of clipping, kept from call to call
reduction.py                    sums over shards: one all-reduce a round
presence.py                     gradients that only some processes have, where processes share states
backend.py                      the protocol that backends implement
"""
