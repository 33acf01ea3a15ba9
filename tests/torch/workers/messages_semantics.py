"""Checks of message passing on three ranks, in one launch. Prints `ok NAME` for each; any failure ends the launch."""

import messages_dataflow
import messages_errors
import messages_randomness
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    for check in (*messages_dataflow.CHECKS, *messages_randomness.CHECKS, *messages_errors.CHECKS):
        check()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
