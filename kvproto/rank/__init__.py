"""The common part of prefill and decode ranks: handles, turns, pools and their registration, page tables."""
