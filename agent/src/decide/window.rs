//! When an effect may be there: pure.

use jiff::SignedDuration;
use windtunnel_crds::{NodeInjection, injection::NodeFault};

use super::{LATE, Now, WAIT};
use crate::model::{Entry, Window};

/// When the effect may be there: the start's place on the boot clock, found once. `None` while
/// there is no start; an error if it is too late for one.
pub(super) fn window(
    injection: &NodeInjection,
    fault: &NodeFault,
    entry: &Entry,
    now: Now,
) -> Result<Option<Window>, String> {
    let Some(start) = &injection.spec.start_time else {
        return if now.boot > entry.prepared_at + WAIT {
            Err(format!(
                "the run did not start within {} s of being prepared",
                WAIT.as_secs()
            ))
        } else {
            Ok(None)
        };
    };
    let late = now.wall.duration_since(start.0);
    if late > SignedDuration::try_from(LATE).unwrap_or(SignedDuration::MAX) {
        return Err(format!(
            "this node learned of the start {:.1} s late",
            late.as_secs_f64()
        ));
    }
    if now.boot > entry.prepared_at + WAIT {
        return Err(format!(
            "the run started more than {} s after this node had prepared for it",
            WAIT.as_secs()
        ));
    }
    let anchor = if late.is_negative() {
        // A start further ahead than the operator ever puts it is a clock that is off.
        now.boot + late.unsigned_abs().min(LATE)
    } else {
        now.boot.saturating_sub(late.unsigned_abs())
    };
    let begin = anchor + fault.start_after.get();
    let end = (begin + fault.duration.get()).min(anchor + injection.spec.duration.get());
    Ok(Some(Window { begin, end }))
}
