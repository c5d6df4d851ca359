#!/usr/bin/env perl
# A strict reader and writer of kvproto in Perl 5.14 or newer, with a 64-bit perl and no module but those of its core.
# It was written from docs/agents.md and the pages that it names. Its tables are registry.json, read when it starts:
#     perl codec.pl [REGISTRY.json]
use strict;
use warnings;
use FindBin;

package Json;    # with the kinds of values kept apart, numbers as their text, strings as the bytes of their UTF-8

sub parse {
    my ($text) = @_;
    my $at = \$text;
    my $value = value($at);
    $$at =~ /\G\s*\z/gc or die "not JSON\n";
    return $value;
}

sub value {
    my ($at) = @_;
    $$at =~ /\G\s*/gc;
    return { is => 'string', of => string($at) } if $$at =~ /\G"/gc;
    return { is => 'number', of => $1 }          if $$at =~ /\G(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)/gc;
    return { is => 'bool', of => $1 eq 'true' ? 1 : 0 } if $$at =~ /\G(true|false)/gc;
    return { is => 'null' } if $$at =~ /\Gnull/gc;
    if ($$at =~ /\G\[/gc) {
        my @items;
        unless ($$at =~ /\G\s*\]/gc) {
            do { push @items, value($at) } while $$at =~ /\G\s*,/gc;
            $$at =~ /\G\s*\]/gc or die "not JSON\n";
        }
        return { is => 'list', of => \@items };
    }
    $$at =~ /\G\{/gc or die "not JSON\n";
    my (%of, @keys);
    unless ($$at =~ /\G\s*\}/gc) {
        do {
            $$at =~ /\G\s*"/gc or die "not JSON\n";
            my $key = string($at);
            $$at =~ /\G\s*:/gc or die "not JSON\n";
            push @keys, $key unless exists $of{$key};
            $of{$key} = value($at);
        } while $$at =~ /\G\s*,/gc;
        $$at =~ /\G\s*\}/gc or die "not JSON\n";
    }
    return { is => 'object', of => \%of, keys => \@keys };
}

my %ESCAPES = ('"' => '"', '\\' => '\\', '/' => '/', b => "\b", f => "\f", n => "\n", r => "\r", t => "\t");

sub string {
    my ($at) = @_;
    my $text = '';
    until ($$at =~ /\G"/gc) {
        if    ($$at =~ /\G([^"\\]+)/gc) { $text .= $1 }
        elsif ($$at =~ /\G\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})/gc) {
            $text .= utf8_of(0x10000 + ((hex($1) - 0xD800) << 10) + hex($2) - 0xDC00);
        }
        elsif ($$at =~ /\G\\u([0-9a-fA-F]{4})/gc)   { $text .= utf8_of(hex $1) }
        elsif ($$at =~ /\G\\(["\\\/bfnrt])/gc)      { $text .= $ESCAPES{$1} }
        else                                        { die "not JSON\n" }
    }
    return $text;
}

sub utf8_of {    # half a surrogate pair becomes bytes that are not UTF-8
    my ($code) = @_;
    return pack 'C', $code if $code < 0x80;
    return pack 'C2', 0xC0 | $code >> 6, 0x80 | $code & 63 if $code < 0x800;
    return pack 'C3', 0xE0 | $code >> 12, 0x80 | $code >> 6 & 63, 0x80 | $code & 63 if $code < 0x10000;
    return pack 'C4', 0xF0 | $code >> 18, 0x80 | $code >> 12 & 63, 0x80 | $code >> 6 & 63, 0x80 | $code & 63;
}

sub quoted {
    my ($text) = @_;
    $text =~ s/([\x00-\x1f"\\\x7f])/sprintf '\\u%04x', ord $1/ge;
    return qq("$text");
}

package main;

use constant { U64 => ~0, EXACT => 9007199254740991 };

our (%ENUMS, %LAYOUTS, %TYPES, %LIMITS, %NAMES);    # NAMES: parts by their names and aliases
my $VALID = qr/\A(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}
    |\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*+\z/x;

sub refuse { my ($code, $path) = @_; die { error => $code, path => $path } }

sub plain {    # JSON data without kinds, for the registry
    my ($value) = @_;
    return { map { $_ => plain($value->{of}{$_}) } @{ $value->{keys} } } if $value->{is} eq 'object';
    return [ map { plain($_) } @{ $value->{of} } ] if $value->{is} eq 'list';
    return $value->{of};
}

sub load {
    my ($file) = @_;
    open my $in, '<:raw', $file or die "$file: $!\n";
    my $facts = plain(Json::parse(do { local $/; <$in> }));
    $LIMITS{$_} = $facts->{limit}{$_}{value} for keys %{ $facts->{limit} };
    $ENUMS{$_} = [ $facts->{enum}{$_}{open}, $facts->{enum}{$_}{values} ] for keys %{ $facts->{enum} };
    $ENUMS{ErrorCode} = [ 1, { map { $_ => $facts->{error}{$_}{code} } keys %{ $facts->{error} } } ];
    push @$_, { reverse %{ $_->[1] } } for values %ENUMS;
    for my $name (keys %{ $facts->{part} }) {
        my $part = { name => $name, optional => $facts->{part}{$name}{optional} };
        $NAMES{$_} = $part for $name, @{ $facts->{part}{$name}{aliases} || [] };
    }
    for my $name (keys %{ $facts->{struct} }, keys %{ $facts->{message} }) {
        my $body = $facts->{message}{$name} || $facts->{struct}{$name};
        my @fields = map { field($_) } sort { $a->{id} <=> $b->{id} } @{ $body->{field} };
        $LAYOUTS{$name} = {
            name => $name, fields => \@fields, by_id => { map { $_->{id} => $_ } @fields },
            by_name => { map { $_->{name} => $_ } @fields }, rules => $body->{rule} || [],
        };
        next unless exists $facts->{message}{$name};
        @{ $LAYOUTS{$name} }{qw(id major)} = ($body->{id}, $body->{frozen} ? 0 : $facts->{protocol}{major});
        $TYPES{ $body->{id} } = $LAYOUTS{$name};
    }
}

sub field {
    my ($row) = @_;
    my ($kind, $inner) = $row->{type} =~ /^(list|array)<(.*)>$/ ? ($1, $2) : ($row->{type}, undef);
    my $of = $inner ? field({ type => $inner, name => '', id => 0, presence => '' }) : undef;
    ($kind, my $name) = split /:/, $kind;
    my %tops = (list => 'max_list', array => 'max_array', str => 'max_string', bytes => 'max_bytes');
    my $bits = $kind =~ /^u(\d+)$/ ? $1 : 16;
    my $top = $tops{$kind} ? $LIMITS{ $tops{$kind} } : $bits == 64 ? U64 : (1 << $bits) - 1;
    return {
        id => $row->{id}, name => $row->{name}, kind => $kind, of => $of, named => $name, bits => $bits,
        required => $row->{presence} eq 'required', limit => $top,
        min => $row->{length} || $row->{min} || 0, max => $row->{length} || $row->{max} || $top,
    };
}

# Reading. A reader is { data, at, end, values }; `values` is undef for a bare struct.

sub need {
    my ($r, $count, $path) = @_;
    refuse('TRUNCATED', $path) if $count > $r->{end} - $r->{at};
}

sub take {
    my ($r, $count, $path) = @_;
    need($r, $count, $path);
    $r->{at} += $count;
    return substr $r->{data}, $r->{at} - $count, $count;
}

sub number {    # a big-endian unsigned number
    my ($bytes) = @_;
    return unpack 'Q>', substr("\0" x 8 . $bytes, -8);
}

my %SIZES = (
    (map { $_ => [ 'int', 0 ] } 0xCC .. 0xCF), (map { $_ => [ 'signed', 0 ] } 0xD0 .. 0xD3),
    (map { $_ => [ 'bin', 0 ] } 0xC4 .. 0xC6), (map { $_ => [ 'ext', 0 ] } 0xC7 .. 0xC9),
    (map { $_ => [ 'str', 0 ] } 0xD9 .. 0xDB), (map { $_ => [ 'array', 0 ] } 0xDC, 0xDD),
    (map { $_ => [ 'map', 0 ] } 0xDE, 0xDF), (map { $_ => [ 'ext', 1 ] } 0xD4 .. 0xD8),
    0xC2 => ['bool'], 0xC3 => ['bool'],
);

sub kind_of {    # by the first byte; nil, floats and c1 have none
    my ($first) = @_;
    return 'int' if $first < 0x80;
    return 'map' if $first < 0x90;
    return 'array' if $first < 0xA0;
    return 'str' if $first < 0xC0;
    return 'signed' if $first >= 0xE0;
    return $SIZES{$first} ? $SIZES{$first}[0] : 'none';
}

sub head {    # the number or length of the value at hand, in its shortest form; its kind is known
    my ($r, $path) = @_;
    my $first = ord take($r, 1, $path);
    return $first if $first < 0x80;
    return $first & 0x0F if $first < 0xA0;
    return $first & 0x1F if $first < 0xC0;
    return $first - 0x100 if $first >= 0xE0;
    return 1 << $first - 0xD4 if $first >= 0xD4 && $first <= 0xD8;
    my ($low) = grep { $first >= $_ } 0xDE, 0xDC, 0xD9, 0xD0, 0xCC, 0xC7, 0xC4;
    my $size = 1 << $first - $low;
    $size *= 2 if $low == 0xDE || $low == 0xDC;
    my $bytes = take($r, $size, $path);
    my $value = number($bytes);
    if ($low == 0xD0) {
        my $negative = 1 << 8 * $size - 1;
        refuse('NOT_CANONICAL', $path) if $value < $negative;
        my $signed = unpack 'q>', substr("\xff" x 8 . $bytes, -8);
        my %above = (1 => -32, 2 => -128, 4 => -32768, 8 => -2147483648);
        refuse('NOT_CANONICAL', $path) if $signed >= $above{$size};
        return $signed;
    }
    my $least = $size > 1 ? 1 << 4 * $size : $low == 0xCC ? 128 : $low == 0xD9 ? 32 : 0;
    $least = 16 if ($low == 0xDE || $low == 0xDC) && $size == 2;
    refuse('NOT_CANONICAL', $path) if $value < $least;
    refuse('NOT_CANONICAL', $path) if $low == 0xC7 && $size == 1 && grep { $value == $_ } 1, 2, 4, 8, 16;
    return $value;
}

sub expect {
    my ($r, $kind, $path) = @_;
    need($r, 1, $path);
    my $found = kind_of(ord substr $r->{data}, $r->{at}, 1);
    if ($kind eq 'int' && $found eq 'signed') {
        head($r, $path);
        refuse('BAD_TYPE', $path);
    }
    refuse('BAD_TYPE', $path) if $found ne $kind;
}

sub sized {    # the length of a list or map, whose limits and least bytes are checked
    my ($r, $each, $path) = @_;
    my $count = head($r, $path);
    refuse('TOO_LARGE', $path) if $count > $LIMITS{max_list};
    if (defined $r->{values}) {
        $r->{values} += $count;
        refuse('TOO_LARGE', $path) if $r->{values} > $LIMITS{max_values};
    }
    need($r, $each * $count, $path);
    return $count;
}

sub in_range {
    my ($value, $field, $path) = @_;
    refuse('OUT_OF_RANGE', $path) if $value < $field->{min} || $value > $field->{max};
}

sub enter {
    my ($depth, $path) = @_;
    refuse('TOO_DEEP', $path) if $depth > $LIMITS{max_depth};
}

sub read_value {
    my ($r, $f, $depth, $path) = @_;
    my $kind = $f->{kind};
    if ($kind eq 'struct') {
        return read_map($r, $LAYOUTS{ $f->{named} }, $depth + 1, $path);
    }
    if ($kind eq 'list') {
        enter($depth + 1, $path);
        expect($r, 'array', $path);
        my $count = sized($r, 1, $path);
        in_range($count, $f, $path);
        return [ map { read_value($r, $f->{of}, $depth + 1, "$path\[$_]") } 0 .. $count - 1 ];
    }
    return read_array($r, $f, $path) if $kind eq 'array';
    return read_bytes($r, $f, $path) if $kind eq 'bytes' || $kind eq 'str';
    if ($kind eq 'bool') {
        expect($r, 'bool', $path);
        return ord(take($r, 1, $path)) - 0xC2;
    }
    expect($r, 'int', $path);
    my $value = head($r, $path);
    return read_enum($value, $f->{named}, $path) if $kind eq 'enum';
    in_range($value, $f, $path);
    return $value;
}

sub read_enum {
    my ($value, $name, $path) = @_;
    my ($open, undef, $names) = @{ $ENUMS{$name} };
    return $value if exists $names->{$value};
    refuse('OUT_OF_RANGE', $path) if $value > 0xFFFF;
    refuse('UNKNOWN_ENUM_VALUE', $path) unless $open;
    return $value;
}

sub read_bytes {
    my ($r, $f, $path) = @_;
    my $text = $f->{kind} eq 'str';
    expect($r, $text ? 'str' : 'bin', $path);
    my $length = head($r, $path);
    refuse('TOO_LARGE', $path) if $length > $f->{limit};
    my $bytes = take($r, $length, $path);
    refuse('BAD_TEXT', $path) if $text && $bytes !~ $VALID;
    in_range($length, $f, $path);
    return $bytes;
}

my @UNSIGNED = (undef, 'C*', 'S<*', 'L<*', 'Q<*', 'c*', 's<*', 'l<*', 'q<*');

sub read_array {    # an array of a field; without one, any, as it is skipped
    my ($r, $f, $path) = @_;
    expect($r, 'ext', $path);
    my $length = head($r, $path);
    my $code = unpack 'c', take($r, 1, $path);
    refuse('BAD_TYPE', $path) if $code < 1 || $code > 8;
    my $width = 1 << ($code - 1) % 4;
    refuse('BAD_TYPE', $path) if $f && ($code > 4 || 8 * $width > $f->{of}{bits});
    refuse('BAD_LENGTH', $path) if $length % $width;
    refuse('TOO_LARGE', $path) if $length / $width > $LIMITS{max_array};
    my @values = unpack $UNSIGNED[$code], take($r, $length, $path);
    refuse('NOT_CANONICAL', $path) if $width > narrowest(\@values, $code > 4) || !@values && $code != 1;
    in_range(scalar @values, $f, $path) if $f;
    return \@values;
}

sub narrowest {    # bytes of an element
    my ($values, $signed) = @_;
    my ($least, $most) = (0, 0);
    for (@$values) { $most = $_ if $_ > $most; $least = $_ if $_ < $least }
    for my $width (1, 2, 4) {
        my $top = (1 << 8 * $width - ($signed ? 1 : 0)) - 1;
        return $width if $most <= $top && $least >= ($signed ? -$top - 1 : 0);
    }
    return 8;
}

sub read_id {
    my ($r, $path) = @_;
    expect($r, 'int', $path);
    return head($r, $path);
}

sub read_map {
    my ($r, $layout, $depth, $path) = @_;
    enter($depth, $path);
    expect($r, 'map', $path);
    my $count = sized($r, 2, $path);
    my ($before, %map) = 0;
    for (1 .. $count) {
        my $id = read_id($r, $path);
        my $field = $layout->{by_id}{$id};
        my $here = joined($path, $field ? $field->{name} : sprintf '#%04x', $id);
        refuse('FIELD_ORDER', $here)  if $id <= $before;
        refuse('OUT_OF_RANGE', $here) if $id > 0xFFFF;
        $before = $id;
        if ($field) { $map{ $field->{name} } = read_value($r, $field, $depth, $here) }
        else {
            refuse('UNKNOWN_FIELD', $here) if $id < 0x8000;
            skip($r, $depth, $here);
        }
    }
    for my $field (@{ $layout->{fields} }) {
        refuse('MISSING_FIELD', joined($path, $field->{name})) if $field->{required} && !exists $map{ $field->{name} };
    }
    check_rules($layout, \%map, $path);
    return \%map;
}

sub skip {    # an unknown value, which keeps the rules of bodies; all faults have its path
    my ($r, $depth, $path) = @_;
    need($r, 1, $path);
    my $kind = kind_of(ord substr $r->{data}, $r->{at}, 1);
    if    ($kind eq 'int' || $kind eq 'signed') { head($r, $path) }
    elsif ($kind eq 'bool') { take($r, 1, $path) }
    elsif ($kind eq 'ext')  { read_array($r, undef, $path) }
    elsif ($kind eq 'str')  { read_bytes($r, { kind => 'str', limit => $LIMITS{max_string}, min => 0, max => U64 }, $path) }
    elsif ($kind eq 'bin')  { read_bytes($r, { kind => 'bytes', limit => $LIMITS{max_bytes}, min => 0, max => U64 }, $path) }
    elsif ($kind eq 'array') {
        enter($depth + 1, $path);
        skip($r, $depth + 1, $path) for 1 .. sized($r, 1, $path);
    }
    elsif ($kind eq 'map') {
        enter($depth + 1, $path);
        my $before = 0;
        for (1 .. sized($r, 2, $path)) {
            my $id = read_id($r, $path);
            refuse('FIELD_ORDER', $path)  if $id <= $before;
            refuse('OUT_OF_RANGE', $path) if $id > 0xFFFF;
            $before = $id;
            skip($r, $depth + 1, $path);
        }
    }
    else { refuse('BAD_TYPE', $path) }
}

sub joined { my ($path, $name) = @_; return length $path ? "$path.$name" : $name }

sub read_frame {
    my ($data) = @_;
    my $magic = substr 'KVPW', 0, length $data;
    refuse('BAD_MAGIC', '@magic')   if substr($data, 0, length $magic) ne $magic;
    refuse('TRUNCATED', '@length')  if length $data < 16;
    my ($major, undef, $type, $flags, undef, $length) = unpack 'x4 C C S< S< S< L<', $data;
    refuse('UNSUPPORTED_VERSION', '@major') if $major > 1;
    my $layout = $TYPES{$type} or refuse('UNKNOWN_MESSAGE', '@type');
    refuse('UNSUPPORTED_VERSION', '@major') if $layout->{major} != $major;
    refuse('UNKNOWN_FLAG', '@flags')        if $flags & 0xFF;
    refuse('TOO_LARGE', '@length')          if $length > $LIMITS{max_body};
    refuse('TRUNCATED', '@length')          if length $data < 16 + $length;
    refuse('TRAILING_BYTES', '@length')     if length $data > 16 + $length;
    return ($layout, read_body($layout, substr($data, 16), 0));
}

sub read_body {
    my ($layout, $data, $values) = @_;
    refuse('TOO_LARGE', '') if length $data > $LIMITS{max_body};
    my $r = { data => $data, at => 0, end => length $data, values => $values };
    my $map = read_map($r, $layout, 1, '');
    refuse('TRAILING_BYTES', '') if $r->{at} < $r->{end};
    return $map;
}

# Rules between the fields of one map.

sub compare {
    my ($kind, $one, $other) = @_;
    return $kind eq 'str' || $kind eq 'bytes' ? $one cmp $other : $one <=> $other;
}

my %RULES = (
    ascend => sub { rising(@_, 1) },
    rise   => sub { rising(@_, 0) },
    unique => sub {
        my ($map, undef, $list, $name) = @_;
        my %seen;
        for (0 .. $#{ $map->{$list} }) { return "$list\[$_].$name" if $seen{ $map->{$list}[$_]{$name} }++ }
        return;
    },
    subset => sub {
        my ($map, undef, $part, $whole) = @_;
        my %in = map { $_ => 1 } @{ $map->{$whole} };
        for (0 .. $#{ $map->{$part} }) { return "$part\[$_]" unless $in{ $map->{$part}[$_] } }
        return;
    },
    le     => sub { my ($map, undef, $one, $other) = @_; return $map->{$one} <= $map->{$other} ? undef : $other },
    lt     => sub { my ($map, undef, $one, $other) = @_; return $map->{$one} < $map->{$other} ? undef : $other },
    sum_le => sub {
        my ($map, undef, $one, $other, $top) = @_;
        my $most = $top =~ /^\d+$/ ? $top : $map->{$top};
        return if $map->{$one} <= $most && $map->{$other} <= $most - $map->{$one};
        return $top =~ /^\d+$/ ? $other : $top;
    },
    same_length => sub {
        my ($map, undef, $first, @others) = @_;
        for (@others) { return $_ if exists $map->{$_} && @{ $map->{$_} } != @{ $map->{$first} } }
        return;
    },
    present_iff => sub { tied_to(@_, 1) },
    only_if     => sub { tied_to(@_, 0) },
);

sub rising {
    my ($map, $layout, $list, @rest) = @_;
    my $strictly = pop @rest;
    my ($name) = @rest;
    my $of = $layout->{by_name}{$list}{of};
    my $kind = $name ? $LAYOUTS{ $of->{named} }{by_name}{$name}{kind} : $of->{kind};
    my @values = $name ? map { $_->{$name} } @{ $map->{$list} } : @{ $map->{$list} };
    for (1 .. $#values) {
        my $order = compare($kind, $values[ $_ - 1 ], $values[$_]);
        return "$list\[$_]" . ($name ? ".$name" : '') if $order > 0 || $strictly && $order == 0;
    }
    return;
}

sub tied_to {
    my ($map, $layout, $field, $other, $value, $both) = @_;
    my ($open, $values, $names) = @{ $ENUMS{ $layout->{by_name}{$other}{named} } };
    my $has = $map->{$other};
    return if !defined $has || $open && !exists $names->{$has};
    my $named = $has == $values->{$value};
    return exists $map->{$field} ? $named ? undef : $field : $named && $both ? $field : undef;
}

sub check_rules {
    my ($layout, $map, $path) = @_;
    for my $rule (@{ $layout->{rules} }) {
        my @args = @{ $rule->{args} };
        unless ($rule->{rule} =~ /^(?:present_iff|only_if)$/) {
            my @fields = grep { exists $layout->{by_name}{$_} } $rule->{rule} =~ /^(?:ascend|rise|unique)$/ ? $args[0] : @args;
            next if $rule->{rule} ne 'same_length' && grep { !exists $map->{$_} } @fields;
        }
        my $at = $RULES{ $rule->{rule} }->($map, $layout, @args);
        refuse($rule->{error}, joined($path, $at)) if defined $at;
    }
}

# The JSON form, in and out.

sub from_json {
    my ($value, $layout, $path, $count) = @_;
    refuse('BAD_TYPE', $path) if $value->{is} ne 'object';
    for my $key (@{ $value->{keys} }) {
        refuse('UNKNOWN_FIELD', joined($path, $key)) unless $layout->{by_name}{$key} || $key =~ /^x_/;
    }
    my %map;
    for my $field (@{ $layout->{fields} }) {
        my $here = joined($path, $field->{name});
        if (!exists $value->{of}{ $field->{name} }) {
            refuse('MISSING_FIELD', $here) if $field->{required};
            next;
        }
        $$count++;
        $map{ $field->{name} } = value_from_json($value->{of}{ $field->{name} }, $field, $here, $count);
    }
    check_rules($layout, \%map, $path);
    return \%map;
}

sub value_from_json {
    my ($value, $f, $path, $count) = @_;
    my $kind = $f->{kind};
    return from_json($value, $LAYOUTS{ $f->{named} }, $path, $count) if $kind eq 'struct';
    if ($kind eq 'list' || $kind eq 'array') {
        refuse('BAD_TYPE', $path) if $value->{is} ne 'list';
        my @items = @{ $value->{of} };
        my @values = map { value_from_json($items[$_], $f->{of}, "$path\[$_]", $count) } 0 .. $#items;
        refuse('TOO_LARGE', $path) if @values > $f->{limit};
        in_range(scalar @values, $f, $path);
        $$count += @values if $kind eq 'list';
        return \@values;
    }
    if ($kind eq 'str' || $kind eq 'bytes') {
        refuse('BAD_TYPE', $path) if $value->{is} ne 'string';
        my $bytes = $value->{of};
        if ($kind eq 'bytes') {
            refuse('BAD_TYPE', $path) unless $bytes =~ /\A(?:[0-9a-f]{2})*\z/;
            $bytes = pack 'H*', $bytes;
        }
        else { refuse('BAD_TEXT', $path) if $bytes !~ $VALID }
        refuse('TOO_LARGE', $path) if length $bytes > $f->{limit};
        in_range(length $bytes, $f, $path);
        return $bytes;
    }
    if ($kind eq 'bool') {
        refuse('BAD_TYPE', $path) if $value->{is} ne 'bool';
        return $value->{of};
    }
    return enum_from_json($value, $f->{named}, $path) if $kind eq 'enum';
    my $number = integer($value, $path);
    in_range($number, $f, $path);
    return $number;
}

sub integer {    # of a string of digits, or of a number that a double holds exactly
    my ($value, $path) = @_;
    my ($is, $text) = @$value{qw(is of)};
    refuse('BAD_TYPE', $path) unless $is =~ /^(?:string|number)$/ && $text =~ /\A(?:0|[1-9][0-9]*)\z/;
    my $top = U64 . '';
    my $beyond = length $text > length $top || length $text == length $top && $text gt $top;
    refuse('BAD_TYPE', $path)     if $is eq 'number' && ($beyond || $text > EXACT);
    refuse('OUT_OF_RANGE', $path) if $beyond;
    return 0 + $text;
}

sub enum_from_json {
    my ($value, $name, $path) = @_;
    my ($open, $values, $names) = @{ $ENUMS{$name} };
    if ($value->{is} eq 'string') {
        refuse('UNKNOWN_ENUM_VALUE', $path) unless exists $values->{ $value->{of} };
        return $values->{ $value->{of} };
    }
    refuse('BAD_TYPE', $path) unless $value->{is} eq 'object' && "@{ $value->{keys} }" eq 'unknown';
    my $number = integer($value->{of}{unknown}, $path);
    refuse('OUT_OF_RANGE', $path) if $number > 0xFFFF;
    refuse('UNKNOWN_ENUM_VALUE', $path) if !$open || exists $names->{$number};
    return $number;
}

sub to_json {
    my ($map, $layout) = @_;
    my @pairs = map { Json::quoted($_->{name}) . ':' . value_to_json($map->{ $_->{name} }, $_) }
        grep { exists $map->{ $_->{name} } } @{ $layout->{fields} };
    return '{' . join(',', @pairs) . '}';
}

sub value_to_json {
    my ($value, $f) = @_;
    my $kind = $f->{kind};
    return to_json($value, $LAYOUTS{ $f->{named} }) if $kind eq 'struct';
    return '[' . join(',', map { value_to_json($_, $f->{of}) } @$value) . ']' if $kind eq 'list' || $kind eq 'array';
    return Json::quoted($value) if $kind eq 'str';
    return '"' . unpack('H*', $value) . '"' if $kind eq 'bytes';
    return $value ? 'true' : 'false' if $kind eq 'bool';
    return qq("$value") unless $kind eq 'enum';
    my $name = $ENUMS{ $f->{named} }[2]{$value};
    return defined $name ? qq("$name") : qq({"unknown":"$value"});
}

# Writing: one form of each value.

sub integer_bytes {
    my ($n) = @_;
    return pack 'C', $n        if $n < 0x80;
    return pack 'CC', 0xCC, $n if $n <= 0xFF;
    return pack 'CS>', 0xCD, $n if $n <= 0xFFFF;
    return pack 'CL>', 0xCE, $n if $n <= 0xFFFF_FFFF;
    return pack 'CQ>', 0xCF, $n;
}

sub length_bytes {    # of small forms, and of those with 1 (or none), 2 and 4 bytes
    my ($n, $small, $base, $one, $two, $four) = @_;
    return pack 'C', $base | $n if $n < $small;
    return pack 'CC', $one, $n  if defined $one && $n <= 0xFF;
    return pack 'CS>', $two, $n if $n <= 0xFFFF;
    return pack 'CL>', $four, $n;
}

sub write_map {
    my ($map, $layout) = @_;
    my @present = grep { exists $map->{ $_->{name} } } @{ $layout->{fields} };
    return join '', length_bytes(scalar @present, 16, 0x80, undef, 0xDE, 0xDF),
        map { integer_bytes($_->{id}), write_value($map->{ $_->{name} }, $_) } @present;
}

sub write_value {
    my ($value, $f) = @_;
    my $kind = $f->{kind};
    return write_map($value, $LAYOUTS{ $f->{named} }) if $kind eq 'struct';
    return pack 'C', 0xC2 + $value if $kind eq 'bool';
    return length_bytes(length $value, 32, 0xA0, 0xD9, 0xDA, 0xDB) . $value if $kind eq 'str';
    return length_bytes(length $value, 0, 0, 0xC4, 0xC5, 0xC6) . $value if $kind eq 'bytes';
    if ($kind eq 'list') {
        return join '', length_bytes(scalar @$value, 16, 0x90, undef, 0xDC, 0xDD), map { write_value($_, $f->{of}) } @$value;
    }
    return integer_bytes($value) if $kind ne 'array';
    my %codes = (1 => 1, 2 => 2, 4 => 3, 8 => 4);
    my %fixed = (1 => 0xD4, 2 => 0xD5, 4 => 0xD6, 8 => 0xD7, 16 => 0xD8);
    my $code = $codes{ narrowest($value, 0) };
    my $data = pack $UNSIGNED[$code], @$value;
    my $fixed = $fixed{ length $data };
    return ($fixed ? pack 'C', $fixed : length_bytes(length $data, 0, 0, 0xC7, 0xC8, 0xC9)) . pack('C', $code) . $data;
}

sub body_of {    # the bytes of fields as JSON, if a reader accepts them
    my ($fields, $layout, $counted) = @_;
    my $count = 0;
    my $map = from_json($fields, $layout, '', \$count);
    my $body = write_map($map, $layout);
    refuse('TOO_LARGE', '') if $counted && $count > $LIMITS{max_values} || length $body > $LIMITS{max_body};
    return $body;
}

# The testee protocol.

our %OPERATIONS = (
    hello => sub {
        return '"driver":1,"name":"codec.pl","version":"1","language":"perl","role":"codec","level":"L1",'
            . '"extensions":["catalogue","epochs","inline","intent","json","pull","staged","storage","streams"]';
    },
    decode => sub { return read_answer(pack 'H*', $_[0]{frame}{of}) },
    decode_stream => sub {
        my $data = join '', map { pack 'H*', $_->{of} } @{ $_[0]{chunks}{of} };
        my @frames;
        while (length $data) {
            my $whole = length $data < 16 ? undef : 16 + unpack 'x12 L<', $data;
            my $long = defined $whole && $whole > 16 + $LIMITS{max_body};    # refused by its envelope alone
            my $other = substr($data, 0, 4) ne substr 'KVPW', 0, length $data;
            last unless $other || $long || defined $whole && length $data >= $whole;
            my $size = $whole && !$long ? $whole : 16;
            push @frames, '{' . tried(\&read_answer, substr $data, 0, $size) . '}';
            last if $other;
            $data = length $data > $whole ? substr $data, $whole : '';
        }
        return '"frames":[' . join(',', @frames) . ']';
    },
    decode_struct => sub {
        my $layout = of_kind($_[0]{struct}{of}, 0) or return '"unsupported":true';
        return '"fields":' . to_json(read_body($layout, pack('H*', $_[0]{bytes}{of}), undef), $layout);
    },
    encode => sub {
        my $layout = of_kind($_[0]{message}{of}, 1) or return '"unsupported":true';
        my $body = body_of($_[0]{fields}, $layout, 1);
        my $head = pack 'a4 C C S< S< S< L<', 'KVPW', $layout->{major}, 0, $layout->{id}, 0, 0, length $body;
        return '"frame":"' . unpack('H*', $head . $body) . '"';
    },
    encode_struct => sub {
        my $layout = of_kind($_[0]{struct}{of}, 0) or return '"unsupported":true';
        return '"bytes":"' . unpack('H*', body_of($_[0]{fields}, $layout, 0)) . '"';
    },
);

sub read_answer {
    my ($layout, $map) = read_frame($_[0]);
    return qq("message":"$layout->{name}","fields":) . to_json($map, $layout);
}

sub tried {    # the answer, or the refusal
    my ($do, @with) = @_;
    my $answer = eval { $do->(@with) };
    return $answer if defined $answer;
    die $@ unless ref $@;
    return "\"error\":\"$@->{error}\",\"path\":" . Json::quoted($@->{path});
}

sub of_kind {
    my ($name, $message) = @_;
    my $layout = $LAYOUTS{$name};
    return $layout && defined $layout->{id} == $message ? $layout : undef;
}

sub answer {
    my ($question) = @_;
    my $do = $OPERATIONS{ $question->{op}{of} } or return '"unsupported":true';
    return tried($do, $question);
}

sub run {
    load(grep { defined && -e } $ARGV[0], map { "$FindBin::Bin/../../$_/registry.json" } 'spec', '../spec/v1');
    binmode STDIN;
    binmode STDOUT;
    $| = 1;
    while (defined(my $line = <STDIN>)) {
        my $question = Json::parse($line)->{of};
        last if $question->{op}{of} eq 'stop';
        print "{\"seq\":$question->{seq}{of}," . answer($question) . "}\n";
    }
}

run() unless caller;
1;
