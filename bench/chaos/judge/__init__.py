"""The one judge of histories: is there an order of the calls that explains everything that was told and read?

In: the events of a `journal`, of any number of clients and lives of a node. Out: anomalies, none when all is well. `verdict`
is the way in; `history` is what the others look at; each of the rest judges one thing. Pure, and linear but for sorting.
"""
