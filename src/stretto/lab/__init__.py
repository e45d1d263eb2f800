"""Virtual hosts joined by a network of a given speed, on one machine (Linux). See `lab` and docs/lab.md."""

from stretto.job.ledger_file import Ledger
from stretto.lab.lab import Job, Lab, Result, lab_available
from stretto.lab.ledger import Traffic
from stretto.lab.link import Process, Sink

__all__ = ["Job", "Lab", "Ledger", "Process", "Result", "Sink", "Traffic", "lab_available"]
