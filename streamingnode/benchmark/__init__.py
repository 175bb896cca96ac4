"""How fast this machine is with a node, against what is possible without one: measured through the public interface."""
