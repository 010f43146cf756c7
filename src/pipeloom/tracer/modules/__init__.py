"""The fallback: models that torch.export cannot capture are cut between modules.

The unit of cutting is a module, named by its FQN. Every stage runs the user's own forward from the start;
modules of other stages are stubs there, and tensors that other stages hold stand in without data. What
runs between the modules ("glue": residual sums, the loss, a branch on data) runs wherever its data is."""
