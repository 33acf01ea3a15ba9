"""The two forms of training steps: recorded pipelines, and message passing between the owners of modules."""
