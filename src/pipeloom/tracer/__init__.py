"""nn.Module -> OpGraph, and StageGraph -> stage functions. The only room that knows torch.export."""
