//! The kernels, as PTX text: the driver compiles them when they are loaded, for whatever GPU it finds.

use std::ffi::CStr;

/// Entries and their parameters, in order:
/// `spin(cycles u64)`: one block after another waits that many clock cycles;
/// `whereabouts(out u64, cycles u64)`: thread 0 of each block writes the number of its multiprocessor to
/// `out[block]` (u32), then the block waits;
/// `touch(base u64, bytes u64, stride u64)`: a write to every `stride` bytes;
/// `stray(at u64)`: one write to an address, whoever it belongs to;
/// `work(out u64, rounds u32)`: each thread computes `rounds` × 8 multiply-adds and, which never happens,
/// writes a result that is negative.
pub const TEXT: &CStr = c"
.version 6.3
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 cycles)
{
    .reg .u64 %begin, %now, %want;
    .reg .pred %early;
    ld.param.u64 %want, [cycles];
    mov.u64 %begin, %clock64;
spin_more:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %early, %now, %want;
    @%early bra spin_more;
    ret;
}

.visible .entry whereabouts(.param .u64 out, .param .u64 cycles)
{
    .reg .u64 %begin, %now, %want, %at, %offset;
    .reg .u32 %sm, %block, %thread;
    .reg .pred %early, %other;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %other, %thread, 0;
    @%other bra stay;
    ld.param.u64 %at, [out];
    cvta.to.global.u64 %at, %at;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %offset, %block, 4;
    add.u64 %at, %at, %offset;
    mov.u32 %sm, %smid;
    st.global.u32 [%at], %sm;
stay:
    ld.param.u64 %want, [cycles];
    mov.u64 %begin, %clock64;
stay_more:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %early, %now, %want;
    @%early bra stay_more;
    ret;
}

.visible .entry touch(.param .u64 base, .param .u64 bytes, .param .u64 stride)
{
    .reg .u64 %at, %end, %step, %index, %all;
    .reg .u32 %block, %width, %thread, %blocks;
    .reg .pred %done;
    ld.param.u64 %at, [base];
    cvta.to.global.u64 %at, %at;
    ld.param.u64 %end, [bytes];
    add.u64 %end, %end, %at;
    ld.param.u64 %step, [stride];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %index, %block, %width;
    cvt.u64.u32 %all, %thread;
    add.u64 %index, %index, %all;
    mul.lo.u64 %index, %index, %step;
    add.u64 %at, %at, %index;
    mul.wide.u32 %all, %blocks, %width;
    mul.lo.u64 %all, %all, %step;
touch_more:
    setp.ge.u64 %done, %at, %end;
    @%done bra touch_end;
    st.global.u8 [%at], 1;
    add.u64 %at, %at, %all;
    bra touch_more;
touch_end:
    ret;
}

.visible .entry stray(.param .u64 at)
{
    .reg .u64 %at;
    ld.param.u64 %at, [at];
    st.global.u32 [%at], 1;
    ret;
}

.visible .entry work(.param .u64 out, .param .u32 rounds)
{
    .reg .f32 %a, %b, %c, %d, %factor, %less;
    .reg .u32 %left, %thread;
    .reg .u64 %at;
    .reg .pred %more, %negative;
    mov.u32 %thread, %tid.x;
    cvt.rn.f32.u32 %a, %thread;
    add.f32 %b, %a, 0f3F800000;
    add.f32 %c, %a, 0f40000000;
    add.f32 %d, %a, 0f40400000;
    mov.f32 %factor, 0f3F7FFFF0;
    mov.f32 %less, 0f3F000000;
    ld.param.u32 %left, [rounds];
work_more:
    fma.rn.f32 %a, %a, %factor, %less;
    fma.rn.f32 %b, %b, %factor, %less;
    fma.rn.f32 %c, %c, %factor, %less;
    fma.rn.f32 %d, %d, %factor, %less;
    fma.rn.f32 %a, %a, %factor, %less;
    fma.rn.f32 %b, %b, %factor, %less;
    fma.rn.f32 %c, %c, %factor, %less;
    fma.rn.f32 %d, %d, %factor, %less;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %more, %left, 0;
    @%more bra work_more;
    add.f32 %a, %a, %b;
    add.f32 %c, %c, %d;
    add.f32 %a, %a, %c;
    setp.lt.f32 %negative, %a, 0f00000000;
    @!%negative bra work_end;
    ld.param.u64 %at, [out];
    cvta.to.global.u64 %at, %at;
    st.global.f32 [%at], %a;
work_end:
    ret;
}
";

/// Multiply-adds of one round of `work` in one thread.
pub const WORK_PER_ROUND: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and parameter types of each entry.
    fn entries(text: &str) -> Vec<(String, Vec<String>)> {
        let entry = |rest: &str| {
            let (name, rest) = rest.split_once('(')?;
            let (parameters, _) = rest.split_once(')')?;
            let kinds = parameters.split(',').filter_map(|one| one.split_whitespace().nth(1));
            Some((name.to_owned(), kinds.map(str::to_owned).collect()))
        };
        text.split(".visible .entry ").skip(1).filter_map(entry).collect()
    }

    #[test]
    fn every_entry_has_the_parameters_that_its_launch_gives() {
        let text = TEXT.to_str().unwrap();
        let named = |name: &str, kinds: &[&str]| {
            (name.to_owned(), kinds.iter().map(|kind| (*kind).to_owned()).collect::<Vec<_>>())
        };
        let expected = [
            named("spin", &[".u64"]),
            named("whereabouts", &[".u64", ".u64"]),
            named("touch", &[".u64", ".u64", ".u64"]),
            named("stray", &[".u64"]),
            named("work", &[".u64", ".u32"]),
        ];
        assert_eq!(entries(text), expected);
    }

    #[test]
    fn the_text_is_whole() {
        let text = TEXT.to_str().unwrap();
        assert!(text.trim_start().starts_with(".version 6.3\n.target sm_70\n.address_size 64"));
        assert_eq!(text.matches('{').count(), text.matches('}').count());
        assert_eq!(text.matches('{').count(), entries(text).len());
        assert!(text.is_ascii());
    }

    #[test]
    fn every_jump_has_a_target_and_every_register_is_declared() {
        for body in TEXT.to_str().unwrap().split(".visible .entry ").skip(1) {
            let mut declared: Vec<&str> = ["%clock64", "%tid", "%ctaid", "%ntid", "%nctaid", "%smid"].into();
            for line in body.lines().map(str::trim).filter(|line| line.starts_with(".reg")) {
                declared.extend(line.split([' ', ',', ';']).filter(|word| word.starts_with('%')));
            }
            let code = body.lines().map(str::trim).filter(|line| !line.starts_with(".reg"));
            for line in code {
                for used in line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '%' || c == '_')) {
                    let known = !used.starts_with('%') || declared.contains(&used);
                    assert!(known, "{used} in {line}");
                }
                if let Some((_, target)) = line.split_once("bra ") {
                    let label = format!("{}:", target.trim_end_matches(';'));
                    assert!(body.lines().any(|other| other.trim() == label), "{label}");
                }
            }
        }
    }
}
