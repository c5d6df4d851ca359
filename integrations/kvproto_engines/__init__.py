"""What the adapters of engines have in common: facts that two different engines state alike."""
