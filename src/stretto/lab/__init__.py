"""Virtual hosts joined by a network of a given speed, on one machine (Linux). See `lab` and docs/lab.md."""

from stretto.lab.connection import LabProcess, Sink
from stretto.lab.lab import Lab, LabJob, Result, lab_available
from stretto.lab.ledger import Traffic
from stretto.launching.ledger_file import WireCount

__all__ = ["LabJob", "Lab", "WireCount", "LabProcess", "Result", "Sink", "Traffic", "lab_available"]
