"""Two levels: workers of one host, or of a group, combine over what they share, and hosts or groups over the network.

    value, elastic      what a strategy names
    hosts               who is in which group
    training            all-reduce between hosts
    summing_servers     servers add up what groups have summed
    stepping_servers    servers step, and a group is one worker to them
    elastic_groups      groups train by themselves; `center` is what they meet on the servers

What the last two have in common: `group_rounds` (rounds inside a group), `group_job` (a group as a job), `from_first` (what the
first worker of a group gets for all), `group_admission` (what is refused).
"""

from stretto.aggregate.hierarchy.elastic import Elastic as Elastic
from stretto.aggregate.hierarchy.value import Hierarchy as Hierarchy
