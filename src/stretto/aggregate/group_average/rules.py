"""What becomes of a worker's model when a round has ended: the two rules of WAGMA, the paper's and the released code's.

    W        before the step        Sum, n    what the group has added up, and of how many models
    W'       after it

                paper                                               code
    in time     Sum / n                  W' is in Sum               (Sum + W) / (n + 1) + W' - W        W is in Sum
    late        (Sum + W') / (n + 1)     an older one is            the same                            an older one is
    all         the mean of all W', in both

If nobody else was there, W' is kept. The paper's rule keeps the mean over the group if all are in time. The code's does not:
each counts itself twice, and so moves less.

Departs: the code adds the gradient after the average of all as well, so that models differ again at once; here they are equal
         after it, whatever the rule. It divides by 9 and by 64, the sizes of its experiment.
"""

from __future__ import annotations

import numpy as np

from stretto.aggregate.group_average.butterfly import Values
from stretto.aggregate.group_average.machine import RoundAverage
from stretto.aggregate.group_average.value import Rule


def merge(rule: Rule, average: RoundAverage, before: Values, stepped: Values) -> Values:
    """The new model, in memory of its own or in that of `average`, which is not to be written to."""
    if average.is_global:
        return average.total
    number = len(average.contributors)
    if number == 1:
        return stepped
    if rule == "code":
        new = average.total + before
        new /= np.float32(number + 1)
        new += stepped - before
    elif average.is_included:
        new = average.total / np.float32(number)
    else:
        new = average.total + stepped
        new /= np.float32(number + 1)
    return new
