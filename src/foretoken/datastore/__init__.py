"""Token datastores: texts with a suffix array each, on disk, memory-mapped, grown by segments."""
