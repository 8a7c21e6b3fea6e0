"""Mooncake: a store that spans machines, and one of this machine to try it with."""
