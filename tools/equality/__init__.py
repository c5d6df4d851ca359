"""Whether implementations are equal: what they plan and read, or refuse, of worlds and frames that an adversary makes up."""
