//! What an Xid says of the board. After the column "immediate action" of NVIDIA's Xid catalogue
//! (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html): RESTART_APP and IGNORE leave the board in
//! use, RESET_GPU and beyond do not. Codes that only boards before Ampere have are from the older listing.

/// What becomes of the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum XidClass {
    /// Nothing: a program's own fault, or a notice that comes with another Xid.
    Harmless,
    /// It works on; a reset puts right what is left, when that is convenient.
    Degraded,
    /// It must be reset before it is used again. What runs may go on or fail by itself.
    Broken,
    /// It does not answer any more, and nothing on it goes on: the node must be restarted.
    Lost,
}

/// A code's class and what it means, in words.
pub fn xid(code: u64) -> (XidClass, &'static str) {
    let known = TABLE.iter().find(|(codes, ..)| codes.contains(&code));
    known.map_or(UNKNOWN, |(_, class, words)| (*class, *words))
}

/// A code that is newer than this table. Most of those that were added since 2022 (143 and up) tell of
/// hardware, links or firmware; keeping new pods off costs less than giving them a board that corrupts.
/// What runs is left alone.
const UNKNOWN: (XidClass, &str) = (XidClass::Broken, "an error that this release does not know");

use XidClass::{Broken, Degraded, Harmless, Lost};

type Line = (&'static [u64], XidClass, &'static str);

const TABLE: &[Line] = &[
    // RESTART_APP, IGNORE: of a program's own making.
    (&[8, 43], Harmless, "a program's work was stopped"),
    (&[11, 25, 32, 80], Harmless, "a program's commands were invalid or damaged"),
    (&[13, 69], Harmless, "a program's fault in the graphics or compute engine"),
    (&[14, 106, 107], Harmless, "a test message"),
    (&[31, 137], Harmless, "a program accessed memory that is not its own"),
    (&[37, 38, 44, 66, 67, 141], Harmless, "an error of the driver that ended with the program"),
    (&[39, 40, 41, 70, 71, 72, 75, 76, 77, 85], Harmless, "a program's fault in a copy engine"),
    (&[126, 127, 128, 129, 130, 131, 132, 133, 134, 135], Harmless, "a program's fault in a copy engine"),
    (&[45], Harmless, "a program's work was cleared away after it ended or another error"),
    (
        &[60, 68, 82, 83, 84, 86, 88, 89, 96, 97, 98, 139, 142],
        Harmless,
        "a program's fault in a video engine",
    ),
    (&[99, 100, 101, 102, 103, 104, 105], Harmless, "a program's fault in a JPEG engine"),
    (&[78], Harmless, "a virtual GPU did not start"),
    (&[93], Harmless, "the board's own storage can no longer be written"),
    (&[108, 152, 153, 159], Harmless, "a program's fault beyond the board"),
    (&[162, 163, 164, 165], Harmless, "a notice about power smoothing"),
    (&[166, 170], Harmless, "a notice about confidential computing"),
    // 154 sums up what others ask for, 171 and 172 say more of a 48.
    (&[154, 171, 172], Harmless, "a notice that comes with another Xid"),
    // The catalogue asks for a reset. But a program can bring it about, and must not be able to take the
    // board from its neighbours; where a reset is due, others follow (NVIDIA's own plugins ignore it too).
    (&[109], Degraded, "switching between programs timed out"),
    // RESTART_APP or IGNORE, and a reset when it suits.
    (&[63], Degraded, "a row of memory will be remapped at the next reset"),
    (&[92], Degraded, "memory has corrected many single-bit errors"),
    (&[94], Degraded, "a memory error was contained to one program"),
    (&[121], Degraded, "errors on the link to the processor are being corrected"),
    // Their fatal forms come with a 48, as the catalogue's second table has it.
    (&[144, 145, 146, 147, 148, 150], Degraded, "an error on NVLink"),
    (&[157], Degraded, "a faulty part could not be retired"),
    (&[160, 161], Degraded, "a memory channel is being retired"),
    (&[168], Degraded, "the board has less memory than it should"),
    // RESET_GPU, CHECK_MECHANICALS, RESTART_VM.
    (&[46], Broken, "the board stopped processing its work"),
    (&[48], Broken, "memory has an uncorrectable error"),
    (&[54], Broken, "the power cable is not connected"),
    (&[57, 58], Broken, "memory is unstable"),
    (&[59, 61, 62, 169], Broken, "a controller on the board halted"),
    (&[64], Broken, "a row of memory could not be remapped"),
    (&[74, 149], Broken, "an NVLink failed"),
    (&[95], Broken, "a memory error was not contained: any program on the board may be affected"),
    (&[110], Broken, "a security fault"),
    (&[119, 120], Broken, "the board's system processor (GSP) does not answer or failed"),
    (&[136, 155], Broken, "an NVLink is down"),
    (&[140], Broken, "memory has an unrecovered error"),
    (&[143], Broken, "the board could not be initialised"),
    (&[151], Broken, "a key could not be rotated"),
    (&[156], Broken, "a faulty part will be retired by a reset"),
    (&[158, 167], Broken, "the board or its PCIe link timed out for good"),
    // RESTART_BM.
    (&[79], Lost, "the board has fallen off the bus"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_code_stands_once_with_words() {
        let mut seen = BTreeSet::new();
        for (codes, _, words) in TABLE {
            assert!(!words.is_empty() && !words.ends_with('.'), "{codes:?}");
            for code in *codes {
                assert!(seen.insert(code), "{code} stands twice");
            }
        }
        assert!(seen.len() > 100, "{}", seen.len());
    }

    #[test]
    fn programs_faults_do_not_cost_the_board_and_hardware_does() {
        for code in [13, 31, 43, 45, 68, 69, 154] {
            assert_eq!(xid(code).0, XidClass::Harmless, "{code}");
        }
        for code in [63, 92, 94, 109] {
            assert_eq!(xid(code).0, XidClass::Degraded, "{code}");
        }
        for code in [46, 48, 62, 64, 74, 95, 119, 120, 140, 143] {
            assert_eq!(xid(code).0, XidClass::Broken, "{code}");
        }
        assert_eq!(xid(79).0, XidClass::Lost);
    }

    #[test]
    fn a_code_nobody_knows_keeps_new_pods_off() {
        for code in [0, 250, u64::MAX] {
            let (class, words) = xid(code);
            assert!(class == XidClass::Broken && words.contains("does not know"), "{code}");
        }
    }
}
