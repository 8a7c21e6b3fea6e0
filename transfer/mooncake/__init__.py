"""Objects in Mooncake Store, in the memory of this and of other processes and machines.

Knows Mooncake's calls, codes and habits; nothing here imports the library before a store is opened.
"""

from transfer.mooncake.objects import MooncakeObjects
from transfer.mooncake.settings import MooncakeSettings

__all__ = ["MooncakeObjects", "MooncakeSettings"]
