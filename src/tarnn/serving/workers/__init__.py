"""Several processes behind one port: each has an engine of its own, and a conversation finds the one that has its state.

The processes accept connections from one listening socket. A process that receives a request of another's conversation hands
over the connection itself, with the request's bytes: from then on not one byte of the answer takes a detour, and the client's
leaving is seen by the process that works for it. Any process can answer any request (the states lie in one folder, and every
answer is the same to the last bit wherever it is made), so where a connection can't be handed over it is answered where it is.
"""
