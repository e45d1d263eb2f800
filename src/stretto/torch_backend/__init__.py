"""torch.distributed on our wire: after `import stretto`, `torch.distributed.init_process_group("stretto")` joins the job.

registering     tells torch of the backend once torch.distributed is imported, and not before
joining         which job, and which of its workers, a process group means
options         how a group's collectives travel: `GroupOptions`
process_group   what torch calls: every collective as torch names it
transfers       each of them as collectives of ours in a `Group`
memory          flat host memory for whatever tensors are given, and the way back
torchs_table    where torch's functions look a group up; `backend_view` is what they ask it about devices
operation       what is under way, and what is left to do when it has ended
work, future    the faces of an operation that torch knows
completion      the threads that complete futures
combining       futures made of several
naming          what a collective is called that a callback has started
matching, pairs sends and receives by source and tag
"""
