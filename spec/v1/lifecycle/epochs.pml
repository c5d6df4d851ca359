/* Memory that is registered again while transfers run, and asked back (registration.md, Epochs; feature EPOCHS).

   The owner registers epoch 1 and then epoch 2, and asks either back, whatever is under way. A write that lands in memory
   that the owner has freed breaks OWNED. */

#define EPOCHS

#include "common.pml"

#define TRANSFERS 2

chan to_holder[1] = [QUEUE] of { mtype, byte, byte, byte }; /* message, number of the transfer, epoch, proof */
chan to_owner[1] = [QUEUE] of { mtype, byte, byte, byte };

/* the owner, by epoch and by transfer */
mtype = { unregistered, mapping, mapped, asked_back, kept, freed, unasked, waiting, over }
mtype owner = session_ready, holder = session_ready;
mtype memory[3] = unregistered, phase[TRANSFERS] = unasked;
byte asks[TRANSFERS]; /* the epoch that it names */

/* the holder */
bool maps[3], gone[3], wanted[3], unprovable[3];
bool heard[TRANSFERS], copying[TRANSFERS], flying[TRANSFERS];
byte into[TRANSFERS], failures = 1;

byte r, e, x, busy;
mtype m;
#define DONE m = 0; r = 0; e = 0; x = 0; busy = 0; SETTLED
#define QUIET(n, e) (!(to_holder[0]??[_,eval(n),eval(e),_]) && !(to_owner[0]??[_,eval(n),eval(e),_]))
#define OF_NONE TRANSFERS

inline owner_hears() {
  to_owner[0]?m,r,e,x; printf("owner hears %e of transfer %d, epoch %d: %d\n", m, r, e, x);
  if
  :: m == Registered -> session_Registered(owner); if :: memory[e] == mapping -> memory[e] = mapped :: else fi
  :: m == Unregistered ->
    session_Unregistered(owner);
    if
    :: memory[e] == asked_back ->
#ifdef WITHOUT_PROVEN
      memory[e] = freed
#else
      memory[e] = (x -> freed : kept) /* KVP-EPO-FREE: without proof it stays as it is */
#endif
    :: else
    fi
  :: m == Done || m == Failed -> phase[r] = over
  fi
}

#ifdef WITHOUT_ANSWER
#define RETURNED freed
#else
#define RETURNED asked_back /* and freed when the holder says so */
#endif

proctype Owner(byte my) { /* of one epoch */
end: do
  :: d_step { memory[my] == unregistered && (my == 1 || memory[my - 1] != unregistered) && ROOM(to_holder[0], 1);
    session_Register(owner); memory[my] = mapping; to_holder[0]!Register,OF_NONE,my,0; printf("register %d\n", my);
      DONE }
  :: d_step { memory[my] == mapping && QUIET(OF_NONE, my) && ROOM(to_holder[0], 1);
    to_holder[0]!Register,OF_NONE,my,0; printf("register %d again\n", my); DONE }
  :: d_step { memory[my] == mapped && ROOM(to_holder[0], 1);
    session_Unregister(owner); memory[my] = RETURNED; to_holder[0]!Unregister,OF_NONE,my,0;
      printf("unregister %d\n", my); DONE }
  :: d_step { memory[my] == asked_back && QUIET(OF_NONE, my) && !wanted[my] && ROOM(to_holder[0], 1);
    to_holder[0]!Unregister,OF_NONE,my,0; printf("unregister %d again\n", my); DONE }
  od
}

proctype Asking(byte me) {
end: do
  :: d_step { phase[me] == unasked && (memory[1] == mapped || memory[2] == mapped) && ROOM(to_holder[0], 1);
    asks[me] = (memory[2] == mapped -> 2 : 1); phase[me] = waiting;
    to_holder[0]!Transfer,me,asks[me],0; printf("ask %d in epoch %d\n", me, asks[me]); DONE }
  :: d_step { phase[me] == waiting && !copying[me] && QUIET(me, asks[me]) && ROOM(to_holder[0], 1);
    to_holder[0]!Transfer,me,asks[me],0; printf("ask %d again\n", me); DONE }
  od
}

/* Answer for an epoch that is asked back, once nothing copies into it and it is unmapped. */
inline give_back() {
  busy = 0;
#ifndef WITHOUT_UNMAP /* KVP-EPO-UNMAP */
  for (one : 0 .. TRANSFERS - 1) { if :: copying[one] && into[one] == e -> busy = 1 :: else fi }
#endif
  if
  :: !busy && wanted[e] ->
    wanted[e] = false; maps[e] = false; gone[e] = true;
    session_Unregistered(holder); to_owner[0]!Unregistered,OF_NONE,e,!unprovable[e]
  :: else
  fi
}

#ifdef WITHOUT_MOVED
#define TAKEN(e) true
#else
#define TAKEN(e) (maps[e] && !wanted[e]) /* KVP-TRN-AGREE */
#endif

inline holder_hears() {
  to_holder[0]?m,r,e,x; printf("holder hears %e of transfer %d, epoch %d\n", m, r, e);
  if
  :: m == Register -> session_Register(holder); session_Registered(holder); maps[e] = maps[e] || !gone[e];
    to_owner[0]!Registered,OF_NONE,e,0
  :: m == Unregister -> session_Unregister(holder); wanted[e] = true; give_back()
  :: m == Transfer ->
    if
    :: heard[r] && !copying[r] -> to_owner[0]!Done,r,e,0 /* it is over */
    :: heard[r] && copying[r]
    :: !heard[r] && TAKEN(e) -> heard[r] = true; into[r] = e; copying[r] = true; flying[r] = true
    :: !heard[r] && !TAKEN(e) -> heard[r] = true; to_owner[0]!Failed,r,e,0
    fi
  fi
}

proctype Holder() {
end: do
  :: d_step { nempty(to_holder[0]) && ROOM(to_owner[0], 2); holder_hears(); DONE }
  :: d_step { nempty(to_owner[0]) && ROOM(to_holder[0], 1); owner_hears(); DONE }
  :: d_step { LOSABLE(to_holder[0]); lose(to_holder[0], 0, 0); DONE }
  :: d_step { LOSABLE(to_owner[0]); lose(to_owner[0], 1, 0); DONE }
  :: d_step { REPEATABLE(to_holder[0]); repeat(to_holder[0], 0, 0); DONE }
  :: d_step { REPEATABLE(to_owner[0]); repeat(to_owner[0], 1, 0); DONE }
  :: d_step { MOVABLE(to_holder[0]); overtake(to_holder[0], 0, 0); DONE }
  :: d_step { MOVABLE(to_owner[0]); overtake(to_owner[0], 1, 0); DONE }
  od
}

proctype Copy(byte me) {
end: do
  :: d_step { flying[me]; flying[me] = false; printf("land %d in epoch %d\n", me, into[me]);
    CHECK(memory[into[me]] != freed, OWNED); DONE }
  :: d_step { copying[me] && !flying[me] && ROOM(to_owner[0], 2); copying[me] = false; e = into[me];
    printf("copied %d\n", me);
    to_owner[0]!Done,me,e,0; give_back(); DONE }
  :: d_step { failures > 0 && copying[me] && flying[me] && ROOM(to_owner[0], 2); /* its write may still land */
    failures--; copying[me] = false; e = into[me]; unprovable[e] = true; printf("fails %d\n", me);
      to_owner[0]!Failed,me,e,0; give_back(); DONE }
  od
}

/* When nothing can happen any more: what is asked back is freed, or kept for want of proof. */
proctype Rest() {
  atomic {
    timeout;
    CHECK(phase[0] != waiting && phase[1] != waiting, ENDED);
    CHECK(memory[1] != asked_back && memory[2] != asked_back && (memory[1] != kept || unprovable[1]) &&
      (memory[2] != kept || unprovable[2]), RELEASED)
  }
}

init { atomic { run Owner(1); run Owner(2); run Asking(0); run Asking(1); run Copy(0); run Copy(1); run Holder();
  run Rest() } }
