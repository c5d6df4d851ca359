/* One sink and one source from Hello to ready, over connections that break (session.md; registration.md).

   The source mints a session for each Hello that it takes for new; a frame that comes by another connection than its
   session's is answered UNKNOWN_SESSION, upon which the sink resumes. A Hello that comes twice, over two connections, mints two
   sessions, and the source pings or ends either. LEGAL breaks where a correct side hears what its table
   has no row for; ENDED, where both could go on and do not. With PULL both sides register, with STAGED the sink grants slots. */

#include "common.pml"

#ifndef BREAKS /* of the connection */
#define BREAKS 1
#endif
#ifndef PINGS
#define PINGS 1
#endif
#ifndef REFUSALS /* of memory that cannot be mapped */
#define REFUSALS 1
#endif
#define IDS 3
#define NONE 255

chan to_source[1] = [QUEUE] of { mtype, byte, byte, byte }; /* message, session, number of the request, session to resume */
chan to_sink[1] = [QUEUE] of { mtype, byte, byte, byte };

/* the sink */
mtype sink = session_idle;
byte id, said, hello, ping; /* said: Hellos so far; hello, ping: the number of the one that is not answered, or 0 */
bool describing, registering, mapping_here, mapped_here, granted;
/* the source, by session id */
mtype source[IDS + 1] = session_idle;
byte by[IDS + 1], greeting[IDS + 1], opened[BREAKS + 1]; /* by: its connection; opened: the last session of each connection */
byte minted, connection, source_ping /* the session whose Ping is not answered */, breaks = BREAKS, pings = PINGS, refusals = REFUSALS, goodbyes = 1;
bool draining, answered[IDS + 1], asked_to_map[IDS + 1], exposing[IDS + 1];

byte s, n, x, k;
mtype m;
#define SHOW printf("now 0 %e %e\n", sink, source[id])
#define DONE m = 0; s = 0; n = 0; x = 0; k = 0; SETTLED
#define SILENT (len(to_source[0]) + len(to_sink[0]) == 0)
#ifdef WITHOUT_OTHER
#define OURS(s) true
#else
#define OURS(s) (s == id && id != 0) /* KVP-SES-OTHER */
#endif
#define GREETS(m) (m == Welcome || m == Refused && x == Hello)
#define LIVES(state) (state != session_idle && state != session_closed)

inline lose_session() { sink = session_closed; hello = 0; describing = false; registering = false; ping = 0 }

inline welcomed() {
  hello = 0; session_Welcome(sink);
  if
  :: id != 0 && s != id -> to_source[0]!Goodbye,s,0,0; lose_session() /* KVP-SES-RESUMED */
  :: id == 0 -> id = s; session_Describe(sink); describing = true; to_source[0]!Describe,s,0,0
  :: else
  fi
}

inline sink_hears() {
  to_sink[0]?m,s,n,x; printf("deliver 1 0 %e %d %d\n", m, s, n);
  if
  :: sink == session_closed
  :: sink != session_closed && m == Welcome -> if :: hello == n && hello != 0 -> welcomed() :: else fi
  :: sink != session_closed && m == Refused && x == Hello ->
    if
    :: hello == n && hello != 0 && id == 0 -> hello = 0; session_Refused(sink)
    :: hello == n && hello != 0 && id != 0 -> lose_session()
    :: else
    fi
  :: sink != session_closed && !OURS(s) && !GREETS(m) ->
    if :: id != 0 && m != Error -> to_source[0]!Error,s,n,m :: else fi
  :: sink != session_closed && OURS(s) && m == Description && describing ->
    describing = false; session_Description(sink); session_Register(sink); registering = true;
      to_source[0]!Register,s,0,0
  :: sink != session_closed && OURS(s) && m == Refused && x == Describe && describing -> describing = false;
    session_Refused(sink)
  :: sink != session_closed && OURS(s) && m == Refused && x == Register && registering -> registering = false;
    session_Refused(sink)
  :: sink != session_closed && OURS(s) && m == Registered && registering ->
    registering = false; session_Registered(sink);
#ifdef STAGED
    session_Credit(sink); to_source[0]!Credit,s,0,0
#endif
#ifdef PULL
  :: sink != session_closed && OURS(s) && m == Register ->
    if
    :: sink == session_ready && !mapping_here && !mapped_here -> session_Register(sink); mapping_here = true
    :: sink == session_ready && mapped_here -> to_source[0]!Registered,s,1,0
    :: else /* it has overtaken Registered, or is being mapped */
    fi
#endif
  :: sink != session_closed && OURS(s) && m == Ping -> session_Ping(sink); session_Pong(sink);
    to_source[0]!Pong,s,n,0
  :: sink != session_closed && OURS(s) && m == Pong -> session_Pong(sink);
    if :: n == ping -> ping = 0 :: else fi
  :: sink != session_closed && OURS(s) && m == Error ->
    if
    :: hello == 0 && (x == Describe && describing || x == Register && registering || x == Ping && ping != 0) ->
      said++; hello = said; session_Hello(sink); to_source[0]!Hello,0,said,id
    :: else
    fi
  :: sink != session_closed && OURS(s) && m == Goodbye -> session_Goodbye(sink);
    lose_session()
  :: else
  fi
}

inline source_hears_hello() {
  if
  :: x != 0 && LIVES(source[x]) -> opened[by[x]] = (opened[by[x]] == x -> 0 : opened[by[x]]); by[x] = connection;
    greeting[x] = n; opened[connection] = x; to_sink[0]!Welcome,x,n,0
  :: !(x != 0 && LIVES(source[x])) && draining -> to_sink[0]!Refused,0,n,Hello
  :: else ->
    s = opened[connection];
    if
    :: s != 0 && LIVES(source[s]) && greeting[s] == n -> to_sink[0]!Welcome,s,n,0
    :: minted < IDS && !(s != 0 && LIVES(source[s]) && greeting[s] == n) ->
      if :: s != 0 && source[s] == session_open -> source[s] = session_closed :: else fi;
      minted++; s = minted; session_Hello(source[s]); session_Welcome(source[s]);
      by[s] = connection; greeting[s] = n; opened[connection] = s; to_sink[0]!Welcome,s,n,0
    :: else -> to_sink[0]!Refused,0,n,Hello
    fi
  fi
}

inline source_hears() {
  to_source[0]?m,s,n,x; printf("deliver 0 0 %e %d %d\n", m, s, n);
  if
  :: m == Hello -> source_hears_hello()
  :: m != Hello && (!LIVES(source[s]) || by[s] != connection) ->
    if :: m == Describe || m == Register || m == Ping -> to_sink[0]!Error,s,n,m :: else fi /* KVP-SES-UNKNOWN */
  :: m != Hello && LIVES(source[s]) && by[s] == connection ->
    if
    :: m == Describe ->
      if
#ifdef UNFIT
      :: source[s] == session_open -> session_Describe(source[s]); session_Refused(source[s]);
        to_sink[0]!Refused,s,0,Describe
#else
      :: source[s] == session_open -> session_Describe(source[s]); session_Description(source[s]);
        to_sink[0]!Description,s,0,0
#endif
      :: source[s] != session_open -> to_sink[0]!Description,s,0,0
      fi
    :: m == Register ->
      if
      :: source[s] == session_described -> session_Register(source[s]); asked_to_map[s] = true
      :: answered[s] -> to_sink[0]!Registered,s,0,0
      :: else
      fi
    :: m == Credit -> session_Credit(source[s])
#ifdef PULL
    :: m == Registered -> if :: exposing[s] -> exposing[s] = false; session_Registered(source[s]) :: else fi
    :: m == Refused -> if :: exposing[s] -> exposing[s] = false; session_Refused(source[s]) :: else fi
#endif
    :: m == Ping -> session_Ping(source[s]); session_Pong(source[s]); to_sink[0]!Pong,s,n,0
    :: m == Pong -> session_Pong(source[s]); if :: s == source_ping -> source_ping = 0 :: else fi
    :: m == Error -> if :: x == Ping && s == source_ping -> source_ping = 0; source[s] = session_closed :: else fi
    :: m == Goodbye -> session_Goodbye(source[s])
    fi
  fi
}

proctype Sink() {
end: do
  :: d_step { sink == session_idle; said = 1; hello = 1; session_Hello(sink); to_source[0]!Hello,0,1,0;
    printf("dial\n"); DONE }
  :: d_step { nempty(to_sink[0]) && ROOM(to_source[0], 2); sink_hears(); DONE }
  :: d_step { hello != 0 && SILENT; to_source[0]!Hello,0,hello,id; printf("resend 0 0 Hello 0 %d\n", hello); DONE }
  :: d_step { describing && hello == 0 && SILENT; to_source[0]!Describe,id,0,0;
    printf("resend 0 0 Describe %d 0\n", id); DONE }
  :: d_step { registering && hello == 0 && SILENT && !asked_to_map[id]; to_source[0]!Register,id,0,0;
    printf("resend 0 0 Register %d 0\n", id); DONE }
  :: d_step { ping != 0 && hello == 0 && SILENT; to_source[0]!Ping,id,ping,0;
    printf("resend 0 0 Ping %d %d\n", id, ping); DONE }
  :: d_step { pings > 0 && id != 0 && LIVES(sink) && ping == 0 && ROOM(to_source[0], 1);
    pings--; ping = 1; session_Ping(sink); to_source[0]!Ping,id,1,0; printf("ping 0 %d\n", id); DONE }
  :: d_step { goodbyes > 0 && id != 0 && LIVES(sink) && ROOM(to_source[0], 1);
    goodbyes--; session_Goodbye(sink); to_source[0]!Goodbye,id,0,0; lose_session(); printf("goodbye 0 %d\n", id); DONE }
#ifdef PULL
  :: d_step { mapping_here && LIVES(sink) && ROOM(to_source[0], 1);
    mapping_here = false; mapped_here = true; session_Registered(sink); to_source[0]!Registered,id,1,0;
      printf("map 1\n"); DONE }
  :: d_step { refusals > 0 && mapping_here && LIVES(sink) && ROOM(to_source[0], 1);
    refusals--; mapping_here = false; session_Refused(sink); to_source[0]!Refused,id,1,0; printf("refuse 1\n"); DONE }
#endif
  :: d_step { LOSABLE(to_source[0]); lose(to_source[0], 0, 0); DONE }
  :: d_step { LOSABLE(to_sink[0]); lose(to_sink[0], 1, 0); DONE }
  :: d_step { REPEATABLE(to_source[0]); repeat(to_source[0], 0, 0); DONE }
  :: d_step { REPEATABLE(to_sink[0]); repeat(to_sink[0], 1, 0); DONE }
  :: d_step { MOVABLE(to_source[0]); overtake(to_source[0], 0, 0); DONE }
  :: d_step { MOVABLE(to_sink[0]); overtake(to_sink[0], 1, 0); DONE }
  :: d_step { /* what was on its way to the sink is lost with the connection */
    breaks > 0 && sink != session_idle; breaks--; connection++;
    do :: nempty(to_sink[0]) -> to_sink[0]?m,s,n,x :: empty(to_sink[0]) -> break od;
    printf("break\n"); DONE }
  od
}

proctype Source(byte me) { /* one of its sessions */
end: do
  :: d_step { me == 1 && nempty(to_source[0]) && ROOM(to_sink[0], 2); source_hears(); DONE }
  :: d_step { me == 1 && !draining && minted == 0; draining = true; printf("drain\n"); DONE }
  :: d_step { asked_to_map[me] && LIVES(source[me]) && ROOM(to_sink[0], 2);
    asked_to_map[me] = false; answered[me] = true; session_Registered(source[me]); to_sink[0]!Registered,me,0,0;
#ifdef PULL
    session_Register(source[me]); exposing[me] = true; to_sink[0]!Register,me,1,0;
#endif
    printf("map 0\n"); DONE }
  :: d_step { refusals > 0 && asked_to_map[me] && LIVES(source[me]) && ROOM(to_sink[0], 1);
    refusals--; asked_to_map[me] = false; session_Refused(source[me]); to_sink[0]!Refused,me,0,Register;
      printf("refuse 0\n"); DONE }
  :: d_step { exposing[me] && LIVES(source[me]) && by[me] == connection && SILENT && !mapping_here &&
    sink == session_ready && hello == 0;
    to_sink[0]!Register,me,1,0; printf("resend 1 0 Register %d 1\n", me); DONE }
  :: d_step { pings > 0 && LIVES(source[me]) && by[me] == connection && source_ping == 0 && ROOM(to_sink[0], 1);
    pings--; source_ping = me; session_Ping(source[me]); to_sink[0]!Ping,me,1,0; printf("ping 1 %d\n", me); DONE }
  :: d_step { goodbyes > 0 && LIVES(source[me]) && by[me] == connection && ROOM(to_sink[0], 1);
    goodbyes--; session_Goodbye(source[me]); to_sink[0]!Goodbye,me,0,0; printf("goodbye 1 %d\n", me); DONE }
  od
}

/* When nothing can happen any more, the sink is ready, or refused, or has ended. */
proctype Rest() {
  atomic {
    timeout;
    CHECK(hello == 0 && !describing && !registering || !LIVES(source[id]), ENDED)
  }
}

init { atomic { run Sink(); for (k : 1 .. IDS) { run Source(k) }; k = 0; run Rest() } }
