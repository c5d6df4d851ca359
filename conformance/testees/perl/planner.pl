#!/usr/bin/env perl
# A planner of the core of kvproto in Perl, over codec.pl: without deals, sections, encodings and features that place units
# otherwise. It was written from docs/agents.md and the pages that it names.
#     perl planner.pl [REGISTRY.json]
use strict;
use warnings;
use Digest::SHA qw(sha256_hex);
use FindBin;
require "$FindBin::Bin/codec.pl";
our (%ENUMS, %LAYOUTS, %LIMITS, %NAMES, %OPERATIONS);
my (%KIND, %FACT);    # names of values

# Descriptions: each check refuses by BAD_GEOMETRY at its place, in the order of the table of model.md.

sub bad { my ($path) = @_; refuse('BAD_GEOMETRY', $path) }

sub description {    # a Description that may be planned, out of JSON
    my ($fields) = @_;
    my ($count, $layout) = (0, $LAYOUTS{Geometry});
    my $geometry = from_json($fields, $layout, '', \$count);
    bad('geometry') if length write_map($geometry, $layout) > $LIMITS{max_geometry};
    my @groups = @{ $geometry->{groups} };
    unsupported($groups[$_], "groups[$_]") for 0 .. $#groups;
    sizes($geometry);
    check_group($groups[$_], "groups[$_]") for 0 .. $#groups;
    my %by_id = map { $_->{id} => $_ } @groups;
    my (%home, @ranks);
    @ranks = @{ $geometry->{ranks} };
    for my $i (0 .. $#ranks) {
        my @owns = @{ $ranks[$i]{owns} };
        check_share($owns[$_], \%by_id, \%home, "ranks[$i].owns[$_]") for 0 .. $#owns;
    }
    return $geometry;
}

sub unsupported {
    my ($group, $path) = @_;
    refuse('LAYOUT_UNSUPPORTED', "$path.cp_size") if $group->{cp_size} > 1;
    for my $j (0 .. $#{ $group->{parts} }) {
        for (qw(encoding at whole)) {
            refuse('LAYOUT_UNSUPPORTED', "$path.parts[$j].$_") if exists $group->{parts}[$j]{$_};
        }
    }
}

sub sizes {
    my ($geometry) = @_;
    my ($parts, $runs, $claims, $most) = (0, 0, 0, 0);
    for (@{ $geometry->{groups} }) { $parts += @{ $_->{parts} }; $runs += @{ $_->{order} || [] } }
    bad('groups') if $parts > $LIMITS{max_parts} || $runs > $LIMITS{max_runs};
    for my $rank (@{ $geometry->{ranks} }) {
        my $own = 0;
        $own += @{ $_->{layers} } * @{ $_->{lanes} } for @{ $rank->{owns} };
        $claims += $own;
        $most = $own if $own > $most;
    }
    bad('ranks') if @{ $geometry->{ranks} } > $LIMITS{max_ranks} || $claims > $LIMITS{max_claims} || $most > $LIMITS{max_rank_claims};
}

sub check_group {
    my ($group, $path) = @_;
    my @parts = @{ $group->{parts} };
    my $kind = $KIND{ $group->{kind} };
    my (%first, %stands);
    for my $j (0 .. $#parts) {    # a plain part begins at 0 and is the whole lane, so a second one of its name does not fit
        my $first = $first{ $parts[$j]{name} } ||= $parts[$j];
        next if $first == $parts[$j];
        for (qw(dtype lanes)) { bad("$path.parts[$j].$_") if $parts[$j]{$_} != $first->{$_} }
        bad("$path.parts[$j].whole") if $parts[$j]{lane_bytes} != $first->{lane_bytes};
        bad("$path.parts[$j].at");
    }
    if ($kind eq 'HANDOFF') {
        bad("$path.kind") if $group->{model} || $group->{rows} > 1 || $group->{tokens_per_row} > 1 || grep { $_->{lanes} > 1 } @parts;
    }
    bad("$path.partial") if $group->{partial} && $kind ne 'PAGE' && $kind ne 'RING';
    for (@parts) {
        my $named = $NAMES{ $_->{name} } or next;
        bad("$path.parts") if $stands{ $named->{name} }++;
    }
}

sub check_share {
    my ($share, $groups, $home, $path) = @_;
    my $group = $groups->{ $share->{group} } or bad("$path.group");
    bad("$path.layers") if $KIND{ $group->{kind} } eq 'HANDOFF' && "@{ $share->{layers} }" ne '0';
    bad("$path.cp_rank") if $share->{cp_rank} >= $group->{cp_size};
    my @parts = @{ $group->{parts} };
    my @of = map { [] } @parts;
    for my $k (0 .. $#{ $share->{lanes} }) {
        my $span = $share->{lanes}[$k];
        bad("$path.lanes[$k].part") if $span->{part} > $#parts;
        bad("$path.lanes[$k].hi") if $span->{hi} > $parts[ $span->{part} ]{lanes};
        push @{ $of[ $span->{part} ] }, $span;
    }
    for (@of) {
        my @spans = sort { $a->{lo} <=> $b->{lo} } @$_;
        bad("$path.lanes") if !@spans || grep { $spans[$_]{lo} < $spans[ $_ - 1 ]{hi} } 1 .. $#spans;
    }
    for my $layer (@{ $share->{layers} }) {
        for (@parts) {
            my $of = \$home->{"$group->{model} $layer $_->{name}"};
            bad("$path.layers") if defined $$of && $$of != $group->{id};
            $$of = $group->{id};
        }
    }
    bad("$path.layers") if keys %$home > $LIMITS{max_layers};
}

# Planning.

sub owners {    # by model and part name, by layer: the group, its part, and of each rank that owns it the intervals in bytes
    my ($geometry) = @_;
    my %groups = map { $_->{id} => $_ } @{ $geometry->{groups} };
    my %of;
    for my $rank (@{ $geometry->{ranks} }) {
        for my $share (@{ $rank->{owns} }) {
            my $group = $groups{ $share->{group} };
            my @parts = @{ $group->{parts} };
            my @spans = map { [] } @parts;
            for (@{ $share->{lanes} }) {
                my $bytes = $parts[ $_->{part} ]{lane_bytes};
                push @{ $spans[ $_->{part} ] }, [ $_->{lo} * $bytes, $_->{hi} * $bytes ];
            }
            for my $layer (@{ $share->{layers} }) {
                for my $p (0 .. $#parts) {
                    my $at = $of{ $group->{model} }{ $parts[$p]{name} }{$layer} ||= { group => $group, part => $parts[$p], by => {} };
                    $at->{by}{ $rank->{rank} } = $spans[$p];
                }
            }
        }
    }
    return \%of;
}

sub compare_facts {
    my ($source, $sink) = @_;
    my %sides;
    $sides{ $_->{name} }[0] = $_ for @{ $source->{facts} };
    $sides{ $_->{name} }[1] = $_ for @{ $sink->{facts} };
    for my $name (sort keys %sides) {
        my ($one, $other) = @{ $sides{$name} };
        next if $one && $other && $one->{value} eq $other->{value};
        refuse('IDENTITY_MISMATCH', "facts[$name]") if grep { $_ && $FACT{ $_->{rule} } eq 'EQUAL' } $one, $other;
    }
}

sub compare_layer {    # one layer of a part: what both sides state of it
    my ($have, $want, $at) = @_;
    my ($g, $h, $p, $q) = ($have->{group}, $want->{group}, $have->{part}, $want->{part});
    my ($here, $there) = map { my $kind = $KIND{ $_->{kind} }; $kind eq 'RING' ? 'PAGE' : $kind } $g, $h;
    my $part = "$at.parts[$q->{name}]";
    refuse('KIND_MISMATCH', "$at.kind") if $here ne $there;
    refuse('AXIS_MISMATCH', "$at.axis") if ($g->{axis} // 'tokens') ne ($h->{axis} // 'tokens');
    refuse('DTYPE_MISMATCH', "$part.dtype") if $p->{dtype} != $q->{dtype};
    refuse('LANE_MISMATCH', "$part.lanes") if $p->{lanes} * $p->{lane_bytes} != $q->{lanes} * $q->{lane_bytes};
    refuse('ROW_MISMATCH', "$at.tokens_per_row") if $g->{tokens_per_row} != $h->{tokens_per_row};
    if ($here eq 'SLOT') {
        refuse('ROW_MISMATCH', "$at.live_rows") if ($g->{live_rows} // $g->{rows}) != ($h->{live_rows} // $h->{rows});
    }
    refuse('ROW_MISMATCH', "$at.partial") if ($g->{partial} // 0) != ($h->{partial} // 0);
    my ($small, $large) = sort { $a <=> $b } $p->{lane_bytes}, $q->{lane_bytes};
    refuse('LANE_MISMATCH', "$part.lane_bytes") if $large % $small;
}

sub counted {    # the pieces of all intervals of both sides, as KVP-PLAN-SIZE counts them
    my ($have, $want, $cuts) = @_;
    my @bytes = ($have->{part}{lane_bytes}, $want->{part}{lane_bytes});
    my $small = $bytes[0] < $bytes[1] ? $bytes[0] : $bytes[1];
    my %place = map { $cuts->[$_] => $_ } 0 .. $#$cuts;
    my $sum = 0;
    for my $span (map { map { @$_ } values %{ $_->{by} } } $have, $want) {
        $sum += $place{ $span->[1] } - $place{ $span->[0] };
        $sum += ($span->[1] - $span->[0]) / $small if $bytes[0] != $bytes[1];
    }
    return $sum;
}

sub cut {    # the pieces of a layer: [lo, hi, candidates, needy]
    my ($have, $want, $cuts, $at) = @_;
    my @pieces;
    for my $i (1 .. $#$cuts) {
        my ($lo, $hi) = @$cuts[ $i - 1, $i ];
        my ($candidates, $needy) = map {
            my $by = $_->{by};
            [ sort { $a <=> $b } grep { grep { $_->[0] <= $lo && $hi <= $_->[1] } @{ $by->{$_} } } keys %$by ]
        } $have, $want;
        next unless @$needy;
        refuse('COVERAGE', $at) unless @$candidates;
        push @pieces, [ $lo, $hi, $candidates, $needy ];
    }
    return @pieces;
}

sub paired {    # all pieces that the sink needs: { group, model, part, layer, lo, hi, candidates, needy }
    my ($sink, $have, $want) = @_;
    my ($total, @pieces) = 0;
    for my $group (@{ $sink->{groups} }) {
        for my $p (0 .. $#{ $group->{parts} }) {
            my $name = $group->{parts}[$p]{name};
            my $wanted = $want->{ $group->{model} }{$name} || {};
            my $had = $have->{ $group->{model} }{$name};
            my ($at, %cuts) = "groups[$group->{name}]";
            my @layers = sort { $a <=> $b } grep { $wanted->{$_}{group} == $group } keys %$wanted;
            for my $layer (@layers) {
                refuse($had ? 'LAYER_MISSING' : 'PART_MISSING', "$at.parts[$name]") unless $had && $had->{$layer};
                compare_layer($had->{$layer}, $wanted->{$layer}, $at);
            }
            for my $layer (@layers) {
                my %edges = map { map { $_ => 1 } map { map { @$_ } @$_ } values %{ $_->{by} } } $had->{$layer}, $wanted->{$layer};
                $cuts{$layer} = [ sort { $a <=> $b } keys %edges ];
                $total += counted($had->{$layer}, $wanted->{$layer}, $cuts{$layer});
            }
            refuse('TOO_LARGE', "$at.parts[$name]") if $total > $LIMITS{max_pieces};
            for my $layer (@layers) {
                push @pieces, map {
                    { group => $group, part => $p, layer => $layer, lo => $_->[0], hi => $_->[1], candidates => $_->[2], needy => $_->[3] }
                } cut($had->{$layer}, $wanted->{$layer}, $cuts{$layer}, "$at.parts[$name]");
            }
        }
    }
    left_out($sink, $have, $want);
    return @pieces;
}

sub by_itself {    # whether a part is taken or left by itself
    my ($owner) = @_;
    my $named = $NAMES{ $owner->{part}{name} };
    return $KIND{ $owner->{group}{kind} } eq 'HANDOFF' || $named && $named->{optional};
}

sub left_out {    # KVP-PLAN-LEFT
    my ($sink, $have, $want) = @_;
    my %without = map { $_ => 1 } @{ $sink->{without} || [] };
    for my $group (@{ $sink->{groups} }) {
        my $model = $group->{model};
        for my $part (@{ $group->{parts} }) {
            my $wanted = $want->{$model}{ $part->{name} } || {};
            for my $layer (grep { $wanted->{$_}{group} == $group } keys %$wanted) {
                next if by_itself($wanted->{$layer});
                for my $name (keys %{ $have->{$model} }) {
                    my $other = $have->{$model}{$name}{$layer};
                    next if !$other || by_itself($other) || $without{$name} || $want->{$model}{$name}{$layer};
                    refuse('PART_MISSING', "groups[$group->{name}].parts[$part->{name}]");
                }
            }
        }
    }
}

sub elected {    # of each piece and needy rank, the source rank: rows [source, sink, piece]
    my ($pieces, $ordinal) = @_;
    my (@rows, %sets);
    for my $piece (@$pieces) {
        my ($c, $m) = (scalar @{ $piece->{candidates} }, scalar @{ $piece->{needy} });
        if ($m >= $c) {
            push @rows, map { [ $piece->{candidates}[ int($_ * $c / $m) ], $piece->{needy}[$_], $piece ] } 0 .. $m - 1;
            next;
        }
        my $entries = $sets{"@{ $piece->{candidates} }"} ||= {};
        my $entry = $entries->{"$piece->{group}{id} $piece->{layer} @{ $piece->{needy} }"} ||= { of => $piece, pieces => [] };
        push @{ $entry->{pieces} }, $piece;
    }
    for my $entries (values %sets) {
        my $unit = $ordinal;
        for my $entry (sort { before($a->{of}, $b->{of}) } values %$entries) {
            my $candidates = $entry->{of}{candidates};
            for my $sink (@{ $entry->{of}{needy} }) {
                my $source = $candidates->[ $unit++ % @$candidates ];
                push @rows, map { [ $source, $sink, $_ ] } @{ $entry->{pieces} };
            }
        }
    }
    return @rows;
}

sub before {    # the order of entries
    my ($one, $other) = @_;
    return $one->{group}{id} <=> $other->{group}{id} || $one->{layer} <=> $other->{layer} || ascending($one->{needy}, $other->{needy});
}

sub ascending {    # two lists of numbers
    my ($one, $other) = @_;
    for my $i (0 .. ($#$one < $#$other ? $#$one : $#$other)) {
        my $order = $one->[$i] <=> $other->[$i];
        return $order if $order;
    }
    return @$one <=> @$other;
}

sub boxes {    # joined rows of twelve numbers, in order
    my ($elected, $ordinal) = @_;
    my (%spans, %groups, @rows);
    for (@$elected) {
        my ($source, $sink, $piece) = @$_;
        my $group = $piece->{group};
        push @{ $spans{"$source $sink $group->{id} $group->{model} $piece->{part}"}{ $piece->{layer} } }, [ @$piece{qw(lo hi)} ];
    }
    for my $key (keys %spans) {
        my ($source, $sink, $group, $model, $part) = split / /, $key;
        my %layers;    # by interval
        for my $layer (sort { $a <=> $b } keys %{ $spans{$key} }) {
            my @joined;
            for my $span (sort { $a->[0] <=> $b->[0] } @{ $spans{$key}{$layer} }) {
                if (@joined && $joined[-1][1] == $span->[0]) { $joined[-1][1] = $span->[1] }
                else                                         { push @joined, [@$span] }
            }
            push @{ $layers{"@$_"} }, $layer for @joined;
        }
        for my $interval (keys %layers) {
            my @runs;
            for my $layer (@{ $layers{$interval} }) {
                if (@runs && $runs[-1][1] == $layer) { $runs[-1][1]++ }
                else                                 { push @runs, [ $layer, $layer + 1 ] }
            }
            push @rows, map { [ $source, $sink, $group, $model, @$_, $part, split(/ /, $interval), 0, 0, $ordinal ] } @runs;
        }
    }
    return sort { ascending($a, $b) } @rows;
}

sub strings { return '[' . join(',', map { qq("$_") } @_) . ']' }

sub plan {
    my ($question) = @_;
    my ($source, $sink) = map { description($question->{$_}) } qw(source sink);
    compare_facts($source, $sink);
    my ($have, $want) = map { owners($_) } $source, $sink;
    my $ordinal = $sink->{replica};
    my @rows = boxes([ elected([ paired($sink, $have, $want) ], $ordinal) ], $ordinal);
    my (@routes, %awaited);
    for my $row (@rows) {
        push @routes, [ @$row[ 0 .. 2 ], '' ] unless @routes && !ascending([ @{ $routes[-1] }[ 0 .. 2 ] ], [ @$row[ 0 .. 2 ] ]);
        $routes[-1][3] .= pack 'Q<12', @$row;
        $awaited{ $row->[1] }{ $row->[0] } = 1;
    }
    my @told = map { sprintf '{"source":"%s","sink":"%s","group":"%s","digest":"%s"}', @$_[ 0 .. 2 ], sha256_hex($_->[3]) } @routes;
    my @required = map { qq("$_":) . strings(sort { $a <=> $b } keys %{ $awaited{$_} || {} }) } map { $_->{rank} } @{ $sink->{ranks} };
    my $digest = sha256_hex(join '', map { pack 'Q<12', @$_ } @rows);
    return qq("plan":"$digest","routes":[) . join(',', @told) . '],"required":{' . join(',', @required) . '},"cold":[]';
}

$OPERATIONS{hello} = sub { return '"driver":1,"name":"planner.pl","version":"1","language":"perl","role":"planner","level":"L2"' };
$OPERATIONS{plan} = sub {
    %KIND = %{ $ENUMS{ItemKind}[2] };
    %FACT = %{ $ENUMS{FactRule}[2] };
    return plan($_[0]);
};
run();
