"""Who sends what to whom, from what each rank owns; nothing here knows an address, a request or a transport."""
