"""Workers that reach each other one to one, and go on when some die, finish, or come back.

network       how they are joined: `PeerNetwork`; `control` finds what runs where, `until_quit` tells who has finished
meeting       those that live agree on who takes part, and take the mean of what they have: `meeting_messages` is what they
              say, `attempt_sum` what one of them adds up; `living` is what a program calls
pulling       one that comes back takes over the model of one that lives
training      the base of ways to train so
"""
