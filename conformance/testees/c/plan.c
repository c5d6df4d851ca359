/* A planner of kvproto in C11, without a library, made from spec/v1 alone (planning.md, negotiation.md, dcp.md, testee.md).
 * With the files that it includes, it is a testee of the conformance suite, role planner, level L2:
 *
 *     gcc -std=c11 -O2 -o plan plan.c && kvproto-conformance run -- ./plan
 *
 * codec.c reads and writes, description.c says what is wrong with a Description, pieces.c pairs two of them and cuts. Here: election, digests, the testee. */
#ifndef CLAIM /* lower.c includes this file and says more */
#define PLANNER_ALONE
#define CLAIM "\"name\": \"plan.c\", \"version\": \"1\", \"language\": \"c\", \"role\": \"planner\", \"level\": \"L2\", \"extensions\": [\"json\", \"spread\", \"cold\"]"
#endif
#include "pieces.c"

/* ---- election: which candidate each needy rank reads from ---- */

static int by_list(Ranks a, Ranks b) {
    for (size_t i = 0; i < a.count && i < b.count; i++)
        if (a.ranks[i] != b.ranks[i]) return a.ranks[i] > b.ranks[i] ? 1 : -1;
    return (a.count > b.count) - (a.count < b.count);
}
static int by_candidates(const Piece *a, const Piece *b) { /* in ascending order of their sizes, of equal ones as lists */
    return a->candidates.count != b->candidates.count ? (a->candidates.count > b->candidates.count ? 1 : -1) : by_list(a->candidates, b->candidates);
}
static int by_entry(const Piece *a, const Piece *b) {
    if (a->group->id != b->group->id) return a->group->id > b->group->id ? 1 : -1;
    if (a->layer != b->layer) return a->layer > b->layer ? 1 : -1;
    return by_list(a->needy, b->needy);
}
static int by_place(const void *a, const void *b) {
    const Piece *x = a, *y = b;
    bool few = x->needy.count < x->candidates.count, less = y->needy.count < y->candidates.count;
    if (few != less) return few ? 1 : -1; /* those of m >= c come first */
    int found = few ? by_candidates(x, y) : 0;
    return found || !few ? found : by_entry(x, y);
}
static void read_from(const Plan *plan, const Piece *piece, size_t needy, size_t source) {
    const Group *group = piece->group;
    uint64_t row[12] = {plan->source->ranks[source].rank, plan->sink->ranks[piece->needy.ranks[needy]].rank, group->id, group->model, piece->layer, piece->layer + 1,
        piece->part, piece->lo, piece->hi, piece->classes.source, piece->classes.sink, plan->sink->replica};
    add(&rows, row, sizeof row);
}
typedef struct { size_t from, count; uint64_t needy, j; } Run; /* units of one needy rank, the j-th, from a place in the sorted list on */
static int by_length(const void *a, const void *b) {
    const Run *x = a, *y = b;
    return x->count != y->count ? (x->count < y->count ? 1 : -1) : (x->from > y->from) - (x->from < y->from);
}
/* FEW_SOURCES: of the units of candidates S, {needy rank, unit} sorted, the place in S from which each is read. */
static void place_runs(const Plan *plan, Ranks s, uint64_t (*units)[2], size_t n, bool *awaited, size_t *chosen) {
    uint64_t most = 2 * ((n + s.count - 1) / s.count), j = 0, m = 0, *load = get(s.count * sizeof *load);
    Run *runs = get(n * sizeof *runs);
    size_t count = 0;
    for (size_t from = 0, x; from < n; from += x, m++) {
        for (x = 1; from + x < n && units[from + x][0] == units[from][0]; x++) {}
        uint64_t a = (x + most - 1) / most;
        for (size_t i = 0; i < x; i++) {
            if (!i || i * a / x != (i - 1) * a / x) runs[count++] = (Run){from + i, 0, units[from][0], m};
            runs[count - 1].count++;
        }
    }
    qsort(runs, count, sizeof *runs, by_length);
    for (size_t r = 0; r < count; r++) {
        const Run *run = &runs[r];
        bool *mine = &awaited[run->needy * plan->source->rank_count];
        size_t best[2] = {s.count, s.count}; /* of those that it awaits already and that have room; of all */
        j = run->j * s.count / m + plan->sink->replica;
        for (size_t i = 0; i < s.count; i++) {
            size_t k = (size_t)((j + i) % s.count);
            bool again = mine[s.ranks[k]] && load[k] + run->count <= most;
            if (again && (best[0] == s.count || load[k] < load[best[0]])) best[0] = k;
            if (best[1] == s.count || load[k] < load[best[1]]) best[1] = k;
        }
        size_t taken = best[0] < s.count ? best[0] : best[1];
        load[taken] += run->count;
        mine[s.ranks[taken]] = true;
        for (size_t i = 0; i < run->count; i++) chosen[units[run->from + i][1]] = taken;
    }
}
/* Pieces that have the same candidates, and fewer needy ranks than these. */
static void deal_units(const Plan *plan, Piece *first, size_t count, bool *awaited) {
    uint64_t n = 0, u = 0;
    for (size_t i = 0; i < count; i++) {
        if (i && !by_entry(&first[i - 1], &first[i])) first[i].first_unit = first[i - 1].first_unit;
        else {
            first[i].first_unit = n;
            n += first[i].needy.count;
        }
    }
    Ranks s = first->candidates;
    size_t *chosen = get(n * sizeof *chosen);
    uint64_t(*units)[2] = get(n * sizeof *units);
    for (size_t i = 0; i < count; i++)
        for (size_t j = first[i].first_unit < u ? first[i].needy.count : 0; j < first[i].needy.count; j++, u++) {
            units[u][0] = first[i].needy.ranks[j];
            units[u][1] = u;
            chosen[u] = (size_t)((u + plan->sink->replica) % s.count);
        }
    if (plan->few_sources) {
        qsort(units, n, sizeof *units, by_owner);
        place_runs(plan, s, units, n, awaited, chosen);
    }
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < first[i].needy.count; j++) read_from(plan, &first[i], j, s.ranks[chosen[first[i].first_unit + j]]);
}
static void elect(const Plan *plan) {
    Piece *each = (Piece *)pieces.text;
    size_t count = pieces.size / sizeof *each, same_candidates;
    bool *awaited = plan->few_sources ? get(plan->sink->rank_count * plan->source->rank_count) : NULL;
    if (count) qsort(each, count, sizeof *each, by_place);
    for (size_t i = 0; i < count; i += same_candidates) {
        uint64_t c = each[i].candidates.count, m = each[i].needy.count;
        same_candidates = 1;
        if (m < c && !plan->spread_one) {
            while (i + same_candidates < count && !by_candidates(&each[i], &each[i + same_candidates])) same_candidates++;
            deal_units(plan, &each[i], same_candidates, awaited);
            continue;
        }
        for (size_t j = 0; j < m; j++) {
            size_t source = each[i].candidates.ranks[j * c / m];
            if (awaited) awaited[each[i].needy.ranks[j] * plan->source->rank_count + source] = true;
            read_from(plan, &each[i], j, source);
        }
    }
}

/* ---- rows: joined, sorted, digested ---- */

enum { ROW = 12 };
static int by[ROW + 1]; /* how many columns count, and which */
static int by_columns(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    for (int i = 1; i <= by[0]; i++)
        if (x[by[i]] != y[by[i]]) return x[by[i]] > y[by[i]] ? 1 : -1;
    return 0;
}
/* Sorted by some columns, rows become one where they are alike in all but the last of these, and the one begins there where the other ends. */
static void sort_rows(uint64_t (*row)[ROW], size_t count, int columns, const int *which) {
    by[0] = columns;
    memcpy(by + 1, which, (size_t)columns * sizeof *which);
    if (count) qsort(row, count, sizeof *row, by_columns);
}
static size_t joined(uint64_t (*row)[ROW], size_t count, int columns, const int *which, int begin, int end) {
    size_t kept = 0;
    sort_rows(row, count, columns, which);
    by[0]--;
    for (size_t i = 0; i < count; i++) {
        if (kept && row[kept - 1][end] == row[i][begin] && !by_columns(row[kept - 1], row[i])) row[kept - 1][end] = row[i][end];
        else memmove(row[kept++], row[i], sizeof *row);
    }
    return kept;
}
static uint64_t (*join(size_t *count))[ROW] {
    uint64_t(*row)[ROW] = (uint64_t(*)[ROW])rows.text;
    *count = joined(row, rows.size / sizeof *row, 8, (const int[]){0, 1, 2, 6, 9, 10, 4, 7}, 7, 8);
    *count = joined(row, *count, 9, (const int[]){0, 1, 2, 6, 9, 10, 7, 8, 4}, 4, 5);
    sort_rows(row, *count, ROW, (const int[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    return row;
}
static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74,
    0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d,
    0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e,
    0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5,
    0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
static uint32_t turned(uint32_t x, int n) { return x >> n | x << (32 - n); }
static void sha256(const char *bytes, size_t size, char digest[32]) {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t whole = (size + 9 + 63) / 64 * 64;
    uint8_t *padded = get(whole);
    if (size) memcpy(padded, bytes, size);
    padded[size] = 0x80;
    for (int i = 0; i < 8; i++) padded[whole - 1 - (size_t)i] = (uint8_t)((uint64_t)size * 8 >> 8 * i);
    for (size_t block = 0; block < whole; block += 64) {
        uint32_t w[64], v[8];
        for (size_t i = 0; i < 16; i++) w[i] = (uint32_t)number_of(padded + block + 4 * i, 4, false);
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + (turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] + (turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10);
        memcpy(v, h, sizeof v);
        for (int i = 0; i < 64; i++) {
            uint32_t a = v[7] + (turned(v[4], 6) ^ turned(v[4], 11) ^ turned(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) + ROUNDS[i] + w[i];
            uint32_t b = (turned(v[0], 2) ^ turned(v[0], 13) ^ turned(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            memmove(v + 1, v, 7 * sizeof *v);
            v[4] += a;
            v[0] = a + b;
        }
        for (int i = 0; i < 8; i++) h[i] += v[i];
    }
    for (int i = 0; i < 32; i++) digest[i] = (char)(h[i / 4] >> 8 * (3 - i % 4));
}

static uint64_t (*plan_rows(Plan *plan, size_t *count))[ROW] {
    pieces.size = rows.size = 0;
    compare_facts(plan->source, plan->sink);
    for (int left = 0; left < 2; left++)
        for (size_t i = 0; i < plan->sink->group_count; i++) {
            const Group *group = &plan->sink->groups[i];
            for (size_t p = 0; p < group->count; p++) {
                if (group->parts[p].first != p || is_cold(plan, group->model)) continue;
                if (left) check_left(plan, group, &group->parts[p]);
                else pair_part(plan, group, p);
            }
        }
    elect(plan);
    return join(count);
}
static void say_digest(uint64_t (*row)[ROW], size_t count) {
    char *bytes = get(count * sizeof *row), digest[32];
    for (size_t i = 0; i < count * ROW; i++)
        for (int b = 0; b < 8; b++) bytes[8 * i + (size_t)b] = (char)(row[i / ROW][i % ROW] >> 8 * b);
    sha256(bytes, count * sizeof *row, digest);
    say_hex(digest, sizeof digest);
}

/* ---- the testee ---- */

static void answer_plan(const Json *question) {
    Plan plan = {.source = side_of(member(question, "source"))};
    plan.sink = side_of(member(question, "sink"));
    const Json *features = member(question, "features");
    for (const Json *each = features ? features->items : NULL; each; each = each->next) {
        plan.spread_one |= !strcmp(each->text, "SPREAD_ONE");
        plan.few_sources |= !strcmp(each->text, "FEW_SOURCES");
        plan.cold_draft |= !strcmp(each->text, "COLD_DRAFT");
    }
    size_t count;
    uint64_t(*row)[ROW] = plan_rows(&plan, &count);
    say("\"plan\": ");
    say_digest(row, count);
    say(", \"routes\": [");
    for (size_t i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count && !memcmp(row[i], row[i + n], 3 * sizeof(uint64_t)); n++) {}
        static const char *const names[] = {"source", "sink", "group"};
        say(i ? ", {" : "{");
        for (int k = 0; k < 3; k++) {
            say("\"");
            say(names[k]);
            say("\": ");
            say_number(row[i][k]);
            say(", ");
        }
        say("\"digest\": ");
        say_digest(row + i, n);
        say("}");
    }
    say("], \"required\": {");
    for (size_t i = 0; i < plan.sink->rank_count; i++) {
        uint64_t before = 0;
        bool any = false;
        say(i ? ", " : "");
        say_number(plan.sink->ranks[i].rank);
        say(": [");
        for (size_t n = 0; n < count; n++) {
            if (row[n][1] != plan.sink->ranks[i].rank || (any && row[n][0] == before)) continue;
            say(any ? ", " : "");
            say_number(before = row[n][0]);
            any = true;
        }
        say("]");
    }
    say("}, \"cold\": [");
    bool any = false;
    for (size_t i = 0; i < plan.sink->group_count; i++) {
        uint64_t model = plan.sink->groups[i].model;
        bool again = !plan.sink->groups[i].layers;
        for (size_t j = 0; j < i; j++) again |= plan.sink->groups[j].model == model && plan.sink->groups[j].layers;
        if (again || !is_cold(&plan, model)) continue;
        say(any ? ", " : "");
        say_number(model);
        any = true;
    }
    say("]");
}

static void say_some(bool there, uint64_t number) {
    if (there) say_number(number);
    else say("null");
}
static void answer_deal(const char *op, const Json *question) {
    Node map = taken_map(&LAYOUTS[L_Group], member(question, "group"), NULL);
    const Group group = group_of(&map);
    const bool owner = *op == 'o';
    size_t count = 0;
    uint64_t items[2] = {0}, *tokens, *table;
    for (int list = 0; list < 2; list++) items[list] = member(question, list ? "items" : "tokens") ? member(question, list ? "items" : "tokens")->count : 0;
    tokens = get(items[0] * sizeof *tokens);
    table = get(items[1] * sizeof *table);
    for (int list = 0; list < 2; list++, count = 0)
        for (const Json *each = items[list] ? member(question, list ? "items" : "tokens")->items : NULL; each; each = each->next) (list ? table : tokens)[count++] = integer(each, NULL);
    for (int row = 0; row < (owner ? 2 : 1); row++) {
        say(owner ? (row ? "], \"row\": [" : "\"cp_rank\": [") : *op == 'l' ? "\"rows\": [" : *op == 'p' ? "\"pages\": [" : "\"slots\": [");
        for (size_t i = 0; i < items[0]; i++) {
            Place place = place_of(&group, tokens[i]);
            uint64_t most = 0;
            say(i ? ", " : "");
            if (owner) say_some(place.owned, row ? place.row : place.cp_rank);
            else if (*op == 's') {
                uint64_t page = place.row / group.rows;
                bool here = place.owned && place.cp_rank == integer(member(question, "cp_rank"), NULL) && page < items[1];
                say_some(here, here ? table[page] * group.rows + place.row % group.rows : 0);
            }
            if (*op == 'l') say("[");
            for (uint64_t cp_rank = 0; (*op == 'l' || *op == 'p') && cp_rank < group.cp_size; cp_rank++) {
                uint64_t below = rows_below(&group, cp_rank, tokens[i]);
                most = below > most ? below : most;
                if (*op != 'l') continue;
                say(cp_rank ? ", " : "");
                say_number(below);
            }
            if (*op == 'l') say("]");
            if (*op == 'p') say_number((most + group.rows - 1) / group.rows);
        }
    }
    say("]");
}
static bool has(const Json *list, const Json *feature) {
    const Json *each = list ? list->items : NULL;
    while (each && strcmp(each->text, feature->text)) each = each->next;
    return each != NULL;
}
static void answer_negotiate(const Json *sink, const Json *source) {
    unsigned a[3], b[3];
    const Json *mine, *yours = NULL, *lists[4] = {member(sink, "needed"), member(source, "offered"), member(source, "needed"), member(sink, "offered")};
    for (mine = member(sink, "versions")->items; mine && !yours; mine = mine->next) {
        if (sscanf(mine->text, "%u.%u-%u", &a[0], &a[1], &a[2]) != 3) refuse("BAD_TYPE", NULL);
        for (yours = member(source, "versions")->items; yours; yours = yours->next)
            if (sscanf(yours->text, "%u.%u-%u", &b[0], &b[1], &b[2]) == 3 && a[0] == b[0] && a[1] <= b[2] && b[1] <= a[2]) break;
    }
    if (!yours) refuse("NO_VERSION", &(Path){NULL, "versions", 0});
    for (int i = 0; i < 4; i += 2)
        for (const Json *each = lists[i] ? lists[i]->items : NULL; each; each = each->next)
            if (!has(lists[i + 1], each)) refuse("FEATURE_MISSING", &(Path){NULL, i ? "offered" : "needed", 0});
    char version[32];
    snprintf(version, sizeof version, "\"version\": \"%u.%u\"", a[0], a[2] < b[2] ? a[2] : b[2]);
    say(version);
    say(", \"features\": [");
    size_t count = 0;
    uint64_t *both = get((lists[3] ? lists[3]->count : 0) * sizeof *both);
    for (const Json *each = lists[3] ? lists[3]->items : NULL; each; each = each->next)
        if (has(lists[1], each)) both[count++] = integer(each, NULL);
    if (count) qsort(both, count, sizeof *both, by_number);
    for (size_t i = 0; i < count; i++) {
        say(i ? ", " : "");
        say_number(both[i]);
    }
    say("]");
}
static bool answer_of_plan(const char *op, const Json *question) {
    if (!strcmp(op, "plan")) answer_plan(question);
    else if (!strcmp(op, "negotiate")) answer_negotiate(member(question, "sink"), member(question, "source"));
    else if (!strcmp(op, "owner") || !strcmp(op, "length") || !strcmp(op, "pages") || !strcmp(op, "slots")) answer_deal(op, question);
    else return false;
    return true;
}
#ifdef PLANNER_ALONE
static bool answer_more(const char *op, const Json *question) { return answer_of_plan(op, question); }
#endif
