"""The control plane on the network and on this machine: links, processes, files."""
