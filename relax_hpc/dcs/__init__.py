"""Live weights: layouts, versions, the store on every node and the coordinator."""
