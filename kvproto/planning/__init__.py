"""Plans of who sends what to whom, from what each rank owns; knows no address, no request and no transport."""
