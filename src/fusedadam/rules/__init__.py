"""What a rule is, and what becomes of it before a backend compiles it. The rules themselves are in optimizers/.

A rule is a plain Python function: one update, written as in the paper. This room parses it, checks it, turns it into
straight-line code and divides it into stages where it sums or multiplies matrices. It knows neither tensors' addresses
nor optimizers.

rule.py       the contract for authors
ops.py        the functions that a rule may call
arithmetic.py those that IEEE rounds correctly
portable.py   exp, log, power and cos, made of them: the same bits on every processor
newton_schulz.py  what rules that orthogonalize compute: which iterations
orthogonal.py these iterations by torch's products, in a step on any device
clipping.py   clipping by norm, for any rule
restraint.py  cautious steps and clipped updates, for any rule
norms.py      norms of gradient, update and weights, measured in the same visits, for any rule
function.py   the source of a rule or helper, parsed
lowering.py   a rule's source, checked and rewritten as straight-line code
positions.py  rounds and phases of a step
placement.py  where each value is computed: its space and position
stages.py     a rule that sums, divided where it waits for a sum
sums.py       the order in which terms are added: the same on every backend
counts.py     beta ** step, with the same bits on the host and on a device
tracing.py    are a rule's scalars the same on the host and on a device?
scalar_program.py  a rule's scalars as a list of operations, for a kernel on the device
"""
