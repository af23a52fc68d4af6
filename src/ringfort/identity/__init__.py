"""Who a node is and which cluster it belongs to: keys, the cluster's secret, and the handshake that proves both."""
