"""The plan's tensor layouts carried out on a traced program."""
