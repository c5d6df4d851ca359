/* Memory that is registered again while transfers run, and asked back (registration.md, Epochs; feature EPOCHS).

   The owner registers epoch 1 and then epoch 2, and asks either back, whatever is under way: at once, or when its transfers
   are over. A write that lands in memory that the owner has freed breaks OWNED. */

#define EPOCHS

#include "common.pml"

#define TRANSFERS 2
#ifndef CHANGES
#define CHANGES 0 /* how often the owner's Description changes */
#endif

chan to_holder[1] = [QUEUE] of { mtype, byte, byte, byte }; /* message, number of the transfer, epoch, proof */
chan to_owner[1] = [QUEUE] of { mtype, byte, byte, byte };

/* the owner, by epoch and by transfer */
mtype = { unregistered, mapping, mapped, asked_back, kept, freed, refused, unasked, waiting, over }
mtype owner = session_ready, holder = session_ready;
mtype memory[3] = unregistered, phase[TRANSFERS] = unasked;
byte asks[TRANSFERS]; /* the epoch that it names */
bool at_once[3];
byte version, changes = CHANGES; /* of its Description */
bool describing;
byte made_by[3]; /* the version by which an epoch is registered */

/* the holder */
byte last; /* the greatest epoch that it was given */
byte knows; /* the version of the owner's Description */
byte planned_by[3];
bool maps[3], gone[3], wanted[3], unprovable[3];
bool heard[TRANSFERS], accepted[TRANSFERS], copying[TRANSFERS], flying[TRANSFERS];
byte into[TRANSFERS], failures = 1;

byte r, e, x, busy;
mtype m;
#define SHOW printf("now 0 %e %e\n", owner, holder)
#define DONE m = 0; r = 0; e = 0; x = 0; busy = 0; SETTLED
#define QUIET(n, e) (!(to_holder[0]??[_,eval(n),eval(e),_]) && !(to_owner[0]??[_,eval(n),eval(e),_]))
#define OF_NONE TRANSFERS

inline owner_hears() {
  to_owner[0]?m,r,e,x; printf("deliver 1 0 %e %d %d %d\n", m, r, e, x);
  if
  :: m == Registered -> if :: memory[e] == mapping -> session_Registered(owner); memory[e] = mapped :: else fi
  :: m == Refused -> if :: memory[e] == mapping -> session_Refused(owner); memory[e] = refused :: else fi
  :: m == Unregistered ->
    if
    :: memory[e] == asked_back -> session_Unregistered(owner);
#ifdef WITHOUT_PROVEN
      memory[e] = freed
#else
      memory[e] = (x -> freed : kept) /* KVP-EPO-FREE: without proof it stays as it is */
#endif
    :: else
    fi
  :: m == Description -> if :: describing && x == version -> session_Description(owner); describing = false :: else fi
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
  :: d_step { memory[my] == unregistered && (my == 1 || (memory[my - 1] != unregistered && memory[my - 1] != mapping)) &&
    !describing && ROOM(to_holder[0], 1); /* KVP-EPO-ONE */
    session_Register(owner); memory[my] = mapping; made_by[my] = version; to_holder[0]!Register,OF_NONE,my,version;
      printf("register %d\n", my);
      DONE }
  :: d_step { memory[my] == mapping && QUIET(OF_NONE, my) && ROOM(to_holder[0], 1);
    to_holder[0]!Register,OF_NONE,my,made_by[my]; printf("resend 0 0 Register %d %d\n", OF_NONE, my); DONE }
  :: d_step { memory[my] == mapped && ROOM(to_holder[0], 1);
    session_Unregister(owner); memory[my] = RETURNED; to_holder[0]!Unregister,OF_NONE,my,0;
      printf("unregister %d 0\n", my); DONE }
  :: d_step { memory[my] == mapped && ROOM(to_holder[0], 1);
    session_Unregister(owner); memory[my] = RETURNED; at_once[my] = true; to_holder[0]!Unregister,OF_NONE,my,1;
      printf("unregister %d 1\n", my); DONE }
  :: d_step { memory[my] == asked_back && QUIET(OF_NONE, my) && !wanted[my] && ROOM(to_holder[0], 1);
    to_holder[0]!Unregister,OF_NONE,my,at_once[my]; printf("resend 0 0 Unregister %d %d\n", OF_NONE, my); DONE }
  od
}

proctype Changing() {
end: do
  :: d_step { changes > 0 && memory[1] == mapped && !describing && ROOM(to_holder[0], 1);
    changes--; version++; describing = true; session_Describe(owner); to_holder[0]!Describe,OF_NONE,0,version;
      printf("change\n"); DONE }
  :: d_step { describing && QUIET(OF_NONE, 0) && ROOM(to_holder[0], 1);
    to_holder[0]!Describe,OF_NONE,0,version; printf("resend 0 0 Describe %d 0\n", OF_NONE); DONE }
  od
}

proctype Asking(byte me) {
end: do
  :: d_step { phase[me] == unasked && (memory[1] == mapped || memory[2] == mapped) && ROOM(to_holder[0], 1);
    asks[me] = (memory[2] == mapped -> 2 : 1); phase[me] = waiting;
    to_holder[0]!Transfer,me,asks[me],0; printf("ask %d in epoch %d\n", me, asks[me]); DONE }
  :: d_step { phase[me] == waiting && !accepted[me] && QUIET(me, asks[me]) && ROOM(to_holder[0], 1);
    to_holder[0]!Transfer,me,asks[me],0; printf("resend 0 0 Transfer %d %d\n", me, asks[me]); DONE }
  od
}

/* Answer for an epoch that is asked back, once nothing copies into it and it is unmapped. */
inline give_back() {
  busy = 0;
#ifndef WITHOUT_UNMAP /* KVP-EPO-UNMAP */
  for (one : 0 .. TRANSFERS - 1) { if :: accepted[one] && into[one] == e -> busy = 1 :: else fi }
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

/* The owner does not wait: what is not being copied fails with POOL_MOVED; a copy under way is waited for. */
inline end_epoch() {
  for (one : 0 .. TRANSFERS - 1) {
    if
    :: accepted[one] && !copying[one] && into[one] == e -> accepted[one] = false; to_owner[0]!Failed,one,e,0
    :: else
    fi
  }
}

#ifdef WITHOUT_RISE
#define RISES(e) true
#else
#define RISES(e) (e > last) /* KVP-EPO-ORDER */
#endif

inline holder_hears() {
  to_holder[0]?m,r,e,x; printf("deliver 0 0 %e %d %d %d\n", m, r, e, x);
  if
  :: m == Register ->
    if
    :: maps[e] -> to_owner[0]!Registered,OF_NONE,e,0
    :: !maps[e] && RISES(e) && x == knows -> session_Register(holder); session_Registered(holder); maps[e] = true;
      gone[e] = false; last = e; planned_by[e] = x; to_owner[0]!Registered,OF_NONE,e,0
    :: !maps[e] && (!RISES(e) || x != knows) -> session_Register(holder); session_Refused(holder); to_owner[0]!Refused,OF_NONE,e,0
    fi
  :: m == Describe ->
    if
    :: x > knows -> session_Describe(holder); session_Description(holder); knows = x; to_owner[0]!Description,OF_NONE,0,x
    :: x <= knows -> to_owner[0]!Description,OF_NONE,0,x /* it comes again */
    fi
  :: m == Unregister ->
    session_Unregister(holder);
    if :: x && !wanted[e] && !gone[e] -> end_epoch() :: else fi;
    wanted[e] = true; give_back()
  :: m == Transfer ->
    if
    :: heard[r] && !accepted[r] -> to_owner[0]!Done,r,e,0 /* it is over */
    :: heard[r] && accepted[r]
    :: !heard[r] && TAKEN(e) -> heard[r] = true; into[r] = e; accepted[r] = true
    :: !heard[r] && !TAKEN(e) -> heard[r] = true; to_owner[0]!Failed,r,e,0
    fi
  fi
}

proctype Holder() {
end: do
  :: d_step { nempty(to_holder[0]) && ROOM(to_owner[0], 3); holder_hears(); DONE }
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
  :: d_step { accepted[me] && !copying[me]; copying[me] = true; flying[me] = true; printf("copy 0 %d\n", me); DONE }
  :: d_step { flying[me]; flying[me] = false; printf("land %d in epoch %d\n", me, into[me]);
    CHECK(memory[into[me]] != freed, OWNED); CHECK(made_by[into[me]] == planned_by[into[me]], WHOLE); DONE }
  :: d_step { copying[me] && !flying[me] && ROOM(to_owner[0], 2);
    copying[me] = false; accepted[me] = false; e = into[me]; printf("copied 0 %d\n", me);
    to_owner[0]!Done,me,e,0; give_back(); DONE }
  :: d_step { failures > 0 && copying[me] && flying[me] && ROOM(to_owner[0], 2); /* its write may still land */
    failures--; copying[me] = false; accepted[me] = false; e = into[me]; unprovable[e] = true; printf("fails 0 %d 0\n", me);
      to_owner[0]!Failed,me,e,0; give_back(); DONE }
  od
}

/* When nothing can happen any more: what is asked back is freed, or kept for want of proof. */
proctype Rest() {
  atomic {
    timeout;
    CHECK(phase[0] != waiting && phase[1] != waiting && !describing, ENDED);
    CHECK(memory[1] != asked_back && memory[2] != asked_back && (memory[1] != kept || unprovable[1]) &&
      (memory[2] != kept || unprovable[2]), RELEASED)
  }
}

init { atomic { run Owner(1); run Owner(2); run Asking(0); run Asking(1); run Copy(0); run Copy(1); run Holder();
  if :: changes > 0 -> run Changing() :: else fi; run Rest() } }
