"""How the workers of a job are started, found, introduced to each other and told apart from strangers.

    detect         the environment of this process -> Launch: my rank, how many we are, where the rendezvous is
    rendezvous     under torchrun, Slurm and MPI: rank 0 starts the coordinator, all learn its address and the secret
    through_store  where only a rank, a size and a store of torch's are known: the rest follows from what all leave in the store
    introduce      worker side of the introduction: Launch + my address -> the table of all peers; greeting finds out which
                   program listens where no coordinator answers
    coordinator    the process that introduces workers; membership is its protocol, a `protocol.machine.Machine`, with
                   introduction_messages (what is said) and peers (a worker as the others know it);
                   coordinator_process is how others start it, ended how launchers tell it whose process is gone;
                   lasting_membership is one to which members come back, and return_watch how the others hear of it
    secret, zap    one secret per job, the keys made from it, and the handler that refuses whoever does not know it;
                   refusals tells who was turned away, doorstep bounds how many may try at once, monitor reads ZeroMQ's
                   reports about both
    launch         `stretto run`: launch_plan (what was asked for), supervisor, processes and orphans (nothing is left behind),
                   stop_signals (requests to end), output (each worker's lines), launch_report (which worker failed first),
                   survivors (what a job goes on without), node_counts (workers and servers of each node), node_servers (its
                   parameter servers)
    server_meeting how servers on hosts of their own and the workers of a job find each other: `stretto serve`
    spawn          `stretto.launch`: a job inside a program; spawn_guard ends what its workers leave behind
    ledger_file    where a worker leaves the count of bytes it has sent
    doctor         what to paste into a bug report
    hosts          machines, interfaces, addresses

Only this folder and cli.py read the environment, and nothing here imports torch before it is needed: a launcher and a
coordinator start in a moment.
"""
