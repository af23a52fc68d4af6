"""Machines that find each other, agree, elect, watch and heal: pure state machines, and a thin node around them."""
