"""What `bench serve` is made of: a trace's requests made small, servers, and who asks them."""
