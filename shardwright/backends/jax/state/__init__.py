"""The state that training carries from step to step: parameters, optimizer states, their shardings and owners."""
