"""What a prefill rank and a decode rank have in common: handles, turns, pools and their registration, page tables."""
