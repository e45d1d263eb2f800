"""The parameter server: a model's values on servers, to which workers push gradients and from which they pull.

The protocol, as machines without input or output (`docs/parameter-server.md` has it as a whole):

    layout          the model as ranges, the unit of everything below
    hash_ring       which server has which range, and which ones have copies
    messages        what is said, and by whom to whom
    consistency     when a gradient is applied and when a worker may read: one rule for each answer to `sync=`
    replica         what every server of a range has of it, in the same bits
    head            what the first server of a range does: it takes pushes and answers pulls
    chains          the servers of each range: chains that break, are mended, lengthened and handed over
    server          the machine of a server
    client          the machine of a worker; `routes` is where its requests go, `request_order` when they leave,
                    `send_window` how many may be under way
    lives           which life of a rank is meant

In a job:

    value           what a strategy names
    training        synchronous training with servers that only sum
    stepping        training with servers that step: its steps; `model_on_servers` is how the model gets there and comes back,
                    `inventory` what they keep, `stepping_admission` what is refused,
                    `step_under_way` a step, `use_order` the order in which it is pushed and pulled
    encoded_rounds  a worker's side of synchronous rounds that are compressed; `push_encoding` is that of servers that step
    transfer_order  what a schedule's plan means to pushes and pulls; `transfer_cost` measures what they cost
    snapshots       what they have, written to disk while training goes on: who, when and where; `snapshot_content` is what is in
                    a file, and `snapshot_subject` what a worker adds
    server_record   a server's machine with an account of what it does, and client_record a worker's
    server_trace    what a server has done when, as a file; `server_clock` compares the clock of one that was started apart
    sync_spec       an answer to `sync=` as data
    service         servers are told which models to serve
    network         how servers are started and reached; `process` is one of them, `dedicated` one that was started apart
    keeper          starts a server again; how it joins the network, as workers do, is in `lasting_network.py`

The values, which know no protocol:

    range_state     values and an optimizer's state; `range_format` is how they travel, `snapshot` how they are kept in a file
    round_sum       values that are the sum of a round: with `Synchronous` the servers only sum
    encoding        gradients as a codec writes them: which codecs servers know, and how ranges are cut into their blocks
    encoded_sum     the mean of a round as a server writes it, and what that left out
    answers         values as differences to what a worker has: both sides, and the names of copies
    shard_optimizer optimizers as data
    gradient_sum    gradients that arrive one after the other; `read_only` reads them where the wire has put them
    compensation    gradients corrected for their delay
"""

from stretto.aggregate.parameter_server.value import ParameterServer as ParameterServer
