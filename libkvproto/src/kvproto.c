/* SPDX-License-Identifier: Apache-2.0 */
/* libkvproto is one translation unit, so that nothing but kvp_... has a name outside of it. Each part uses those before it. */
#include "kvproto.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "facts.c"
#include "work.c"
#include "read.c"
#include "rules.c"
#include "write.c"
#include "json.c"
#include "message.c"
#include "sha256.c"
#include "description.c"
#include "deal.c"
#include "pieces.c"
#include "plan.c"
#include "lower.c"
