"""Checks of message passing on three ranks, in one launch. Prints `ok NAME` for each; any failure ends the launch."""

import messages_dataflow
import messages_errors
import messages_randomness
from launched import run_checks

if __name__ == "__main__":
    run_checks((*messages_dataflow.CHECKS, *messages_randomness.CHECKS, *messages_errors.CHECKS))
