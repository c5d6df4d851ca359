/* Rules of a map: what its fields have to be to each other. */

static int compare(const kvp_value *a, const kvp_value *b) {
    if (a->kind == TEXT || a->kind == BYTES) {
        size_t shorter = a->count < b->count ? a->count : b->count;
        int order = shorter ? memcmp(a->bytes, b->bytes, shorter) : 0;
        return order ? order : (a->count > b->count) - (a->count < b->count);
    }
    return (a->number > b->number) - (a->number < b->number);
}
static bool same(const kvp_value *a, const kvp_value *b) { return a->kind == b->kind && (!a->kind || !compare(a, b)); }
static kvp_value element(const kvp_value *list, int inner, size_t i) {
    if (list->kind == ARRAY) return (kvp_value){.kind = UINT, .number = list->numbers[i]};
    return inner < 0 ? list->items[i] : list->items[i].items[inner];
}
static _Noreturn void broken(Work *w, const Layout *layout, const Rule *rule, const Path *path, int field, long index) {
    const Type *of = layout->fields[field].type.of;
    Path outer = {path, layout->fields[field].name, 0}, inner = {&outer, NULL, (size_t)index};
    Path last = {&inner, index >= 0 && rule->inner >= 0 ? LAYOUTS[of->ref].fields[rule->inner].name : NULL, 0};
    refuse(w, rule->error, index < 0 ? &outer : last.name ? &last : &inner);
}
static void check_order(Work *w, const Layout *layout, const Rule *rule, const kvp_value *list, const Path *path) {
    for (size_t i = 1; i < list->count; i++) {
        kvp_value this = element(list, rule->inner, i), before = element(list, rule->inner, i - 1);
        int order = compare(&this, &before);
        if (rule->predicate == ASCEND ? order <= 0 : order < 0) broken(w, layout, rule, path, rule->fields[0], (long)i);
    }
}
typedef struct { uint64_t number; size_t place; } Placed;
static int by_placed(const void *a, const void *b, const void *context) {
    const Placed *x = a, *y = b;
    (void)context;
    return x->number != y->number ? (x->number > y->number ? 1 : -1) : (x->place > y->place) - (x->place < y->place);
}
static Placed *sorted(Work *w, const kvp_value *list, int inner) { /* numbers of a list, ascending, so that no list is gone through for each element of another */
    Placed *placed = room_for(w, list->count, sizeof *placed);
    for (size_t i = 0; i < list->count; i++) placed[i] = (Placed){element(list, inner, i).number, i};
    sort(w, placed, list->count, sizeof *placed, by_placed, NULL);
    return placed;
}
static void check_unique(Work *w, const Layout *layout, const Rule *rule, const kvp_value *list, const Path *path) {
    const Placed *placed = sorted(w, list, rule->inner);
    size_t first = list->count;
    for (size_t i = 1; i < list->count; i++)
        if (placed[i].number == placed[i - 1].number && placed[i].place < first) first = placed[i].place;
    if (first < list->count) broken(w, layout, rule, path, rule->fields[0], (long)first);
}
static void check_subset(Work *w, const Layout *layout, const Rule *rule, const kvp_value *list, const kvp_value *all, const Path *path) {
    const Placed *some = sorted(w, list, -1), *others = sorted(w, all, -1);
    size_t first = list->count;
    for (size_t i = 0, j = 0; i < list->count; i++) {
        while (j < all->count && others[j].number < some[i].number) j++;
        bool there = j < all->count && others[j].number == some[i].number;
        if (!there && some[i].place < first) first = some[i].place;
    }
    if (first < list->count) broken(w, layout, rule, path, rule->fields[0], (long)first);
}
static void check_lengths(Work *w, const Layout *layout, const Rule *rule, const kvp_value *map, const Path *path) {
    const kvp_value *first = NULL;
    for (int i = 0; i < rule->count; i++) {
        const kvp_value *here = &map->items[rule->fields[i]];
        if (!here->kind) continue;
        if (first && here->count != first->count) broken(w, layout, rule, path, rule->fields[i], -1);
        if (!first) first = here;
    }
}
static void check_rule(Work *w, const Layout *layout, const Rule *rule, const kvp_value *map, const Path *path) {
    const kvp_value *side[3] = {NULL};
    for (int i = 0; i < 3 && i < rule->count; i++) side[i] = map->items[rule->fields[i]].kind ? &map->items[rule->fields[i]] : NULL;
    switch (rule->predicate) {
        case ASCEND: case RISE:
            if (side[0]) check_order(w, layout, rule, side[0], path);
            break;
        case UNIQUE:
            if (side[0]) check_unique(w, layout, rule, side[0], path);
            break;
        case SUBSET:
            if (side[0] && side[1]) check_subset(w, layout, rule, side[0], side[1], path);
            break;
        case LE: case LT:
            if (side[0] && side[1] && compare(side[0], side[1]) > (rule->predicate == LE ? 0 : -1)) broken(w, layout, rule, path, rule->fields[1], -1);
            break;
        case SUM_LE: {
            bool fixed = rule->count < 3;
            if (!side[0] || !side[1] || !(fixed || side[2])) return;
            uint64_t bound = fixed ? rule->bound : side[2]->number, sum = side[0]->number + side[1]->number;
            if (sum < side[0]->number || sum > bound) broken(w, layout, rule, path, rule->fields[fixed ? 1 : 2], -1);
            break;
        }
        case SAME_LENGTH: check_lengths(w, layout, rule, map, path); break;
        default: { /* ONLY_IF, PRESENT_IFF */
            if (side[1] && !name_of(&ENUMS[layout->fields[rule->fields[1]].type.ref], side[1]->number)) return; /* an unknown value of an open enum: who knows it knows what belongs to it */
            bool is = side[1] && side[1]->number == rule->bound;
            if (rule->predicate == ONLY_IF ? side[0] && !is : (side[0] != NULL) != is) broken(w, layout, rule, path, rule->fields[0], -1);
        }
    }
}
static void check_rules(Work *w, const Layout *layout, const kvp_value *map, const Path *path) {
    for (int i = 0; i < layout->rule_count; i++) check_rule(w, layout, &layout->rules[i], map, path);
}
