"""The main job on real input: this machine's processes, from sampling to a checked Spark table and a picture."""
